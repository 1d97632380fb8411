"""A server's address as a user gives it: what is wrong with it is said before anything is asked."""

from __future__ import annotations

import ipaddress
import re

import httpx2

from tercel.errors import TercelError

_CHARACTERS = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")  # of an address (RFC 3986, section 2)
_EXAMPLE = "give one such as http://localhost:8000"


def parse_address(text: str) -> httpx2.URL:
    """The address, without a trailing `/v1`. Raises `TercelError` unless it is one of http or https, in ASCII."""
    if not _CHARACTERS.fullmatch(text):
        raise TercelError(
            f"{text!r} is not the address of a server: it has blanks or characters outside ASCII; write the host as "
            "its xn-- name and the path percent-encoded"
        )
    if "@" in text:
        raise TercelError("the address of a server must not hold a user name or a password; none is sent to it")
    if "?" in text or "#" in text:
        raise TercelError(f"{text!r} is not the address of a server but of a page; leave out what follows ? or #")
    try:
        url = httpx2.URL(text.rstrip("/").removesuffix("/v1"))
        host = url.raw_host.decode("ascii")
        host.encode("idna")  # what the resolver will do with it
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise TercelError(f"{text!r} is not the address of a server ({error}); {_EXAMPLE}") from error
    if url.scheme not in ("http", "https") or not host:
        raise TercelError(f"{text!r} is not the address of a server; {_EXAMPLE}")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise TercelError(f"{text!r} is not the address of a server: there is no port {url.port}; {_EXAMPLE}")
    return url


def is_local(url: httpx2.URL) -> bool:
    """Whether only this machine or this network knows the host, so that a proxy can know nothing of it."""
    host = url.raw_host.decode("ascii").rstrip(".").partition("%")[0].lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return not (mapped or address).is_global


def is_same_server(url: httpx2.URL, other: httpx2.URL) -> bool:
    return (url.scheme, url.raw_host, url.port) == (other.scheme, other.raw_host, other.port)
