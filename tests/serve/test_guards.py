"""Who may ask, how much, and what every answer carries."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import openai
import pytest

from tercel.decode.vanilla import Vanilla
from tercel.errors import TercelError
from tercel.serve import app
from tercel.serve.running import bound
from tercel.serve.settings import ServerSettings
from tests.decode.drafts import tiny_target
from tests.serve.servers import Running, serving

BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_target("llama", num_hidden_layers=2), Vanilla()) as running:
        yield running


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with serving(tiny_target("llama", num_hidden_layers=2), Vanilla(), api_key="s3cret") as running:
        assert running.openai("s3cret").completions.create(**BODY).choices
        for key in ("s3cre", "S3CRET", "s3crets"):
            with pytest.raises(openai.AuthenticationError):
                running.openai(key).completions.create(**BODY)
        with running.http() as http:
            assert http.post("/v1/completions", json=BODY).headers["www-authenticate"] == "Bearer"
            assert http.get("/health").json() == {"status": "ok"}
            # a key makes sure of more than a name does
            assert http.get("/v1/models", headers={"Host": "a.example", "Authorization": "Bearer s3cret"}).is_success


def test_pages_of_others_get_nothing(server: Running) -> None:
    """Neither by a name of their own for this machine, nor by a form, nor by leave to read."""
    with server.http() as http:
        refused = http.get("/v1/models", headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        assert http.get("/v1/models", headers={"Host": "LOCALHOST:1234"}).is_success
        form = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
        assert form.status_code == 415
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        for reply in (http.options("/v1/completions", headers=asked), http.get("/v1/models", headers=asked)):
            assert not any(name.startswith("access-control") for name in reply.headers)


def test_every_answer_carries_the_headers(server: Running) -> None:
    with server.http() as http:
        for reply in (
            http.get("/health"),
            http.get("/metrics"),
            http.get("/none"),
            http.post("/v1/completions", json=BODY),
            http.post("/v1/completions", json=BODY | {"stream": True}),
            http.post("/v1/completions", json={}),
        ):
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert "server" not in reply.headers


def test_bodies_are_bounded_and_errors_have_openais_shape(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY", 1000)
    json = {"Content-Type": "application/json"}
    with server.http() as http:
        for content, status, part in (
            (b"{" + b" " * 2000, 413, "MiB"),
            (b"{nonsense", 400, "not JSON"),
            (b"\xff", 400, "not readable"),
            (b"[" * 70 + b"]" * 70, 400, "deep"),
            (b"[1]", 400, "object"),
            (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        ):
            reply = http.post("/v1/completions", content=content, headers=json)
            assert reply.status_code == status, content
            assert part in reply.json()["error"]["message"]
        for reply, status in ((http.get("/v1/completions"), 405), (http.get("/nothing/here"), 404)):
            assert reply.status_code == status
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_no_text_of_a_prompt_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with server.http() as http:
        http.post("/v1/completions", json={**BODY, "prompt": "the unspeakable"})
        http.post("/v1/completions", json={**BODY, "prompt": "the unspeakable", "n": 10**6})
    assert "unspeakable" not in caplog.text


def test_wrong_settings_are_told() -> None:
    for wrong in ({"port": 70000}, {"slots": 0}, {"timeout": 0.0}, {"api_key": "a b\n"}, {"queue": -1}):
        with pytest.raises(TercelError):
            ServerSettings("x", **wrong)
    assert ServerSettings("x", host="::1").only_here
    assert not ServerSettings("x", host="0.0.0.0").only_here
    with pytest.raises(TercelError, match=r"cannot listen at 192\.0\.2\.1"):
        bound(ServerSettings("x", host="192.0.2.1", port=0))
