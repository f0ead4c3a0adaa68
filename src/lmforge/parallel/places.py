"""Which part of a whole tensor a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_place(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole, a slice for each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def holds_first(tensor: DTensor) -> bool:
    """Whether this rank is the first of its mesh that holds this part."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(isinstance(p, Replicate) and c > 0 for p, c in zip(tensor.placements, coordinate, strict=True))
