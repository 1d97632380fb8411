"""Clients of running servers: one module for each engine that tells how its drafts fare."""

from __future__ import annotations

from tercel.doctor.clients.llamacpp import LlamaCppClient
from tercel.doctor.clients.sglang import SglangClient
from tercel.doctor.clients.vllm import VllmClient
from tercel.doctor.engine_client import EngineClient, tried
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.interop.engines import find

__all__ = ["CLIENTS", "connect"]

CLIENTS: dict[str, type[EngineClient]] = {
    client.engine: client for client in (VllmClient, SglangClient, LlamaCppClient)
}


def connect(http: Http, engine: str | None = None) -> EngineClient:
    """The server at `http`, which runs `engine`; None asks it for what only one engine has.

    Raises `TercelError` if it cannot be reached or recognised, or nobody can ask servers of that engine.
    """
    if engine is None:
        return CLIENTS[_recognised(http)](http)
    if engine not in CLIENTS:
        raise TercelError(f"no server of {engine!r} can be asked; choose one of {', '.join(CLIENTS)}")
    return CLIENTS[engine](http)


def _recognised(http: Http) -> str:
    counters = tried(http, "/metrics")
    for name in CLIENTS:
        if f"{name}:" in counters:
            return name
    for name, client in CLIENTS.items():
        if client.answers_at(http):
            return name
    *others, last = (find(name).title for name in CLIENTS)
    raise TercelError(
        f"the server at {http.base} is not recognised as {', '.join(others)} or {last}; say which it is with --engine"
    )
