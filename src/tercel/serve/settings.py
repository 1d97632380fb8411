"""What a server is told when it is started."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from tercel import limits
from tercel.decode.prefixes import PREFIX_MB
from tercel.errors import TercelError

CHUNK = 128  # prompt tokens of a step: those who are answered meanwhile wait for no more


@dataclass(frozen=True)
class ServerSettings:
    """name: what the model is called in requests. slots: requests decoded at a time; queue: how many may wait for one.
    timeout: seconds that a request may take. grace: seconds that answers get to end in when the server is stopped; what
    is left is cut. choices: answers that one request may ask for. prefix_cache: megabytes in which is kept what was
    computed for prompts and answers, for later prompts that begin alike.

    Raises `TercelError` for a value outside its range.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    slots: int = 8
    queue: int = 64
    prefill_chunk: int = CHUNK
    timeout: float = 600.0
    grace: float = 20.0
    choices: int = 16
    prefix_cache: int = PREFIX_MB

    def __post_init__(self) -> None:
        def check(name: str, fine: bool, wanted: str) -> None:
            if not fine:
                raise TercelError(f"the server's {name} is {getattr(self, name)!r}, but it must be {wanted}")

        check("port", 0 <= self.port < 1 << 16, "from 0 (any that is free) to 65535")
        check("slots", 1 <= self.slots <= limits.SLOTS, f"from 1 to {limits.SLOTS:,}")
        check("queue", 0 <= self.queue <= limits.COUNT, "at least 0")
        check("prefill_chunk", self.prefill_chunk >= 1, "at least 1")
        check("timeout", 0 < self.timeout <= limits.COUNT, "a positive number of seconds")
        check("grace", 0 <= self.grace <= limits.COUNT, "a number of seconds")
        check("choices", 1 <= self.choices <= limits.SLOTS, f"from 1 to {limits.SLOTS:,}")
        check("prefix_cache", 0 <= self.prefix_cache <= limits.COUNT, "a number of megabytes, or 0 for none")
        key = self.api_key
        if key is not None and (not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip()):
            raise TercelError("the API key must be printable ASCII without blanks around it")

    @property
    def only_here(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
