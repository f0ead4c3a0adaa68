"""Notices that a machine is about to be taken away: a cloud's metadata service, any address, or a file that appears."""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from lmforge.config.notices import CLOUDS

ANSWER_SECONDS = 2.0  # a metadata service is a neighbour; one that does not answer must not pile up
MOST_BYTES = 1 << 20

Ask = Callable[[], bool]


class Notice:
    """Looks for a notice every few seconds in a thread of its own, until one is there or `stop` is called.

    A step never waits for it. What cannot be asked is said once and asked again.
    """

    def __init__(self, asks: Mapping[str, Ask], seconds: float, found: Callable[[], None]):
        self.asks, self.seconds, self.found = asks, seconds, found
        self.ended = threading.Event()
        self.silent: set[str] = set()
        threading.Thread(target=self._look, name="notice", daemon=True).start()

    def stop(self) -> None:
        self.ended.set()

    def _look(self) -> None:
        while not self.ended.is_set():
            for name, ask in self.asks.items():
                if self._asked(name, ask):
                    print(f"{name} says that this machine will be taken away", file=sys.stderr, flush=True)
                    self.found()
                    return
            self.ended.wait(self.seconds)

    def _asked(self, name: str, ask: Ask) -> bool:
        try:
            return ask()
        except Exception as error:  # whatever a stranger answers must not end this thread
            if name not in self.silent:
                self.silent.add(name)
                print(f"warning: {name} gives no answer ({error}); it is asked again", file=sys.stderr, flush=True)
            return False


def asks_of(url: str | None, file: str | None) -> dict[str, Ask]:
    """What is to be asked, by the name it has in messages."""
    asks: dict[str, Ask] = {}
    if url is not None:
        address = CLOUDS.get(url, url)
        known = {path: ask for path, ask in PROTOCOLS.items() if urlsplit(address).path.startswith(path)}
        asks[f"callbacks.preemption.notice_url={url}"] = lambda: next(iter(known.values()), _answers)(address)
    if file is not None:
        asks[f"callbacks.preemption.notice_file={file}"] = Path(file).absolute().exists
    return asks


def _aws(address: str) -> bool:
    """404 until the interruption is decided, then what will happen and when. IMDSv2 wants a token first."""
    token = _get(_at(address, "/latest/api/token"), {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return _get(address, {"X-aws-ec2-metadata-token": token} if token else {}) is not None


def _gcp(address: str) -> bool:
    """FALSE, then TRUE from the preemption on."""
    return (_get(address, {"Metadata-Flavor": "Google"}) or "").strip().upper() == "TRUE"


def _azure(address: str) -> bool:
    """Events of all machines of the scale set or availability set, each with the names of those it is about."""
    headers = {"Metadata": "true"}
    content = json.loads(_get(address, headers) or "{}")
    events = [event for event in content.get("Events", []) if event.get("EventType") == "Preempt"]
    if not events:
        return False
    name = _get(_at(address, "/metadata/instance/compute/name?api-version=2021-02-01&format=text"), headers)
    return any(name in event.get("Resources", []) for event in events)


def _answers(address: str) -> bool:
    """Any other address: an answer of 200."""
    return _get(address, {}) is not None


PROTOCOLS: dict[str, Callable[[str], bool]] = {
    "/latest/meta-data/": _aws,
    "/computeMetadata/": _gcp,
    "/metadata/scheduledevents": _azure,
}


def _at(address: str, path: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}{path}"


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


def _get(address: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The text of an answer of 200, None for one of 404 or 405. Raises OSError for everything else.

    No proxy and no redirect: both would lead away from this machine's own service.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    request = urllib.request.Request(address, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=ANSWER_SECONDS) as answer:
            return str(answer.read(MOST_BYTES).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 405):
                return None
            raise
