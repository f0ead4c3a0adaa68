"""Where clouds tell that a machine is about to be taken away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmforge.config.errors import UsageError

CLOUDS = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}


def check_notice(cfg: Mapping[str, Any]) -> None:
    """Only a cloud's word or an address of the web is asked, whatever the callback's entry is called."""
    urls = {name: (entry or {}).get("notice_url") for name, entry in (cfg["callbacks"] or {}).items()}
    problems = [
        f"callbacks.{name}.notice_url={url}: not allowed; allowed: {', '.join(CLOUDS)}, "
        "an address that begins with http:// or https://, or null"
        for name, url in urls.items()
        if url is not None and url not in CLOUDS and not str(url).startswith(("http://", "https://"))
    ]
    if problems:
        raise UsageError(problems)
