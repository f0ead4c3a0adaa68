"""The one place where a config node becomes an object."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmforge.config.errors import UsageError
from lmforge.config.plain import literal, to_config
from lmforge.config.targets import check_targets, load_target


def build(node: DictConfig | dict[str, Any], **extra: Any) -> Any:
    """Makes the object that `node._target_` names from the node's other keys and `extra`.

    `extra` holds live objects; they are handed over as they are, and beat keys of the same name. Lists and dicts of the
    node arrive as plain Python containers.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    problems = check_targets(plain)
    if "_target_" not in plain:
        problems.append("a node without _target_ cannot be built")
    if problems:
        raise UsageError(problems)
    for target in _targets(plain):
        load_target(target)

    from hydra.utils import instantiate

    # Hydra follows references twice (once in place), so the texts are escaped twice.
    return instantiate(to_config(literal(plain)), _partial_=True, _convert_="all")(**extra)


def _targets(node: Any) -> list[str]:
    if isinstance(node, list):
        return [target for item in node for target in _targets(item)]
    if not isinstance(node, dict):
        return []
    own = [node["_target_"]] if "_target_" in node else []
    return own + [target for value in node.values() for target in _targets(value)]
