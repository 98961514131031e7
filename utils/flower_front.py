#!/usr/bin/env python3
"""Let sites reach the part of a Flower SuperLink that is for them, and nothing else.

    flower_front.py HOST PORT INNER CERTIFICATE KEY CA

A SuperLink of Flower 1.42 has one port for all: for nodes, which show their keys; for its own
programs; and for `flwr run`, which asks for no key, so that whoever reaches it runs programs at the
server and at all sites. This listens at HOST and PORT, and passes what nodes send to the SuperLink
at port INNER of the loopback. It runs in Flower's environment.
"""

from __future__ import annotations

import re
import ssl
import sys
from typing import Any

import httpx
import uvicorn

# All that a node calls.
ALLOWED = re.compile(r"/v1/fleet/[a-z0-9-]{1,64}")
# Bytes; Flower sends parts of 20 MiB at most.
MOST = 64 * 2**20
# Of one connection alone.
PRIVATE = {
    b"connection",
    b"host",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}


class Front:
    """An ASGI program that passes requests of nodes, and answers all others with 404."""

    def __init__(self, inner: int, authority: str):
        context = ssl.create_default_context(cafile=authority)
        self.client = httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{inner}", verify=context, timeout=300
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        if scope["method"] != "POST" or not ALLOWED.fullmatch(scope["path"]):
            await refuse(send, 404)
            return
        body, more = bytearray(), True
        while more:
            part = await receive()
            if part["type"] != "http.request":
                return
            body += part.get("body", b"")
            more = part.get("more_body", False)
            if len(body) > MOST:
                await refuse(send, 413)
                return
        await self.ask(scope, bytes(body), send)

    async def ask(self, scope: dict[str, Any], body: bytes, send: Any) -> None:
        """Pass a request to the SuperLink, and its answer back."""
        request = self.client.build_request(
            "POST", scope["path"], headers=kept(scope["headers"]), content=body
        )
        try:
            answer = await self.client.send(request, stream=True)
        except httpx.HTTPError:
            # As any proxy says it; a node then tries again.
            await refuse(send, 503)
            return
        try:
            start = {"type": "http.response.start", "status": answer.status_code}
            await send(start | {"headers": kept(answer.headers.raw)})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()


def kept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not of one connection alone."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in PRIVATE]


async def refuse(send: Any, status: int) -> None:
    """Answer with a status alone."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def main(host: str, port: str, inner: str, certificate: str, key: str, authority: str) -> None:
    """Serve until a signal ends it."""
    front = Front(int(inner), authority)
    uvicorn.run(
        front,
        host=host,
        port=int(port),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        lifespan="off",
        log_level="warning",
        # A node asks every three seconds.
        timeout_keep_alive=60,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
