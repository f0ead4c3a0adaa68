"""Notices as the clouds give them, from a server on this machine, and a file."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fits import fit
from lmforge.config.checks import preflight
from lmforge.config.errors import Requeue
from lmforge.config.notices import CLOUDS
from lmforge.training import notice
from lmforge.training.notice import Notice, asks_of
from tiny import compose

AWS, GCP, AZURE = (
    "/latest/meta-data/spot/instance-action",
    "/computeMetadata/v1/instance/preempted",
    "/metadata/scheduledevents",
)
NAME = "/metadata/instance/compute/name"
SOON = {"EventType": "Preempt", "Resources": ["vm_1"], "NotBefore": "Mon, 30 Nov 2026 18:29:47 GMT"}


class Service:
    """A metadata service: what it answers by path, and which headers a question must have."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.needs: dict[str, tuple[str, str]] = {}
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                service.asked.append(f"{self.command} {path}")
                name, value = service.needs.get(path, ("", ""))
                right = not name or self.headers.get(name) == value
                code, text = service.answers.get(path, (404, "")) if right else (401, "")
                self.send_response(code)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(text.encode())

            do_PUT = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.server.shutdown()
    running.server.server_close()


def ask(url: str) -> bool:
    (only,) = asks_of(url, None).values()
    return only()


def test_aws(service) -> None:
    service.answers["/latest/api/token"] = (200, "secret")
    service.needs[AWS] = ("X-aws-ec2-metadata-token", "secret")
    assert not ask(service.address + AWS)
    service.answers[AWS] = (200, '{"action": "terminate", "time": "2026-11-30T18:22:00Z"}')
    assert ask(service.address + AWS)
    assert service.asked[:2] == ["PUT /latest/api/token", f"GET {AWS}"]


def test_gcp(service) -> None:
    service.needs[GCP] = ("Metadata-Flavor", "Google")
    for answer, seen in (("FALSE", False), ("TRUE\n", True)):
        service.answers[GCP] = (200, answer)
        assert ask(service.address + GCP) is seen


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([], False),
        ([SOON], True),
        ([{**SOON, "Resources": ["vm_2"]}], False),
        ([{**SOON, "EventType": "Freeze"}], False),
    ],
)
def test_azure_tells_of_neighbours_too(service, events, seen) -> None:
    service.needs |= {AZURE: ("Metadata", "true"), NAME: ("Metadata", "true")}
    service.answers = {AZURE: (200, json.dumps({"DocumentIncarnation": 1, "Events": events})), NAME: (200, "vm_1")}
    assert ask(f"{service.address}{AZURE}?api-version=2020-07-01") is seen


def test_any_other_address(service) -> None:
    assert not ask(f"{service.address}/going")
    service.answers["/going"] = (200, "")
    assert ask(f"{service.address}/going")
    service.answers["/going"] = (302, "")
    with pytest.raises(OSError, match="302"):
        ask(f"{service.address}/going")
    assert "GET /elsewhere" not in service.asked


def test_the_clouds_own_addresses_have_their_protocols() -> None:
    for cloud, path in (("aws", AWS), ("gcp", GCP), ("azure", AZURE)):
        assert path in CLOUDS[cloud]
        assert len([known for known in notice.PROTOCOLS if path.startswith(known)]) == 1


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


def test_who_does_not_answer_is_named_once_and_asked_again(capsys) -> None:
    answers = iter([OSError("refused"), ValueError("no JSON"), False, True])
    found = threading.Event()

    def asked() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    Notice({"the service": asked}, 0.01, found.set)
    assert found.wait(10)
    said = capsys.readouterr().err
    assert "warning: the service gives no answer (refused); it is asked again" in said
    assert "JSON" not in said
    assert said.endswith("the service says that this machine will be taken away\n")


@pytest.mark.parametrize("answer", ["[]", '{"Events": [1]}', '{"Events": 1}'])
def test_a_strange_answer_is_none(service, capsys, answer) -> None:
    """And the question is asked again."""
    service.answers = {AZURE: (200, answer), NAME: (200, "vm_1")}
    found = threading.Event()
    running = Notice(asks_of(f"{service.address}{AZURE}", None), 0.01, found.set)
    until(lambda: len(service.asked) > 1)
    service.answers[AZURE] = (200, json.dumps({"Events": [SOON]}))
    assert found.wait(10)
    running.stop()
    assert "gives no answer (" in capsys.readouterr().err


def test_a_notice_is_not_looked_for_after_the_end() -> None:
    looked: list[float] = []
    running = Notice({"it": lambda: bool(looked.append(time.monotonic()))}, 0.01, lambda: None)
    until(lambda: looked)
    running.stop()
    time.sleep(0.1)
    count = len(looked)
    time.sleep(0.1)
    assert len(looked) == count


def test_without_a_word_nobody_is_asked(shards, monkeypatch) -> None:
    monkeypatch.setattr(notice, "_get", lambda *args: 1 / 0)
    monkeypatch.setattr("lmforge.training.preemption.Notice", lambda *args: 1 / 0)
    assert fit(shards, "trainer.max_steps=1").summary["steps"] == 1


def test_a_notice_ends_a_run_as_a_signal_does(shards, service, capsys) -> None:
    service.answers["/going"] = (200, "")
    words = (f"callbacks.preemption.notice_url={service.address}/going", "callbacks.preemption.notice_seconds=0.01")
    with pytest.raises(Requeue, match="and saved; go on with"):
        fit(shards, "trainer.max_steps=100000", *words)
    assert "says that this machine will be taken away" in capsys.readouterr().err


def test_a_word_that_is_no_address_is_refused(shards) -> None:
    plain = compose(shards)
    plain["callbacks"]["preemption"]["notice_url"] = "file:///etc/hosts"
    plain["callbacks"]["another"] = {"notice_url": "ftp://host"}
    problem, another = preflight(plain)[0]
    assert "callbacks.another.notice_url=ftp://host: not allowed" in another
    assert (
        "callbacks.preemption.notice_url=file:///etc/hosts: not allowed; allowed: aws, gcp, azure, an address"
        in problem
    )
