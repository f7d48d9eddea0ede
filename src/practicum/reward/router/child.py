"""The child of `Router.start_process`: settings come in as one line, the address goes out as one line."""

from __future__ import annotations

import json
import sys

from practicum.errors import RouterError
from practicum.reward.router.launch import serve_until_told
from practicum.reward.router.server import RouterServer
from practicum.reward.router.settings import RouterSettings


def main() -> None:
    settings = RouterSettings.model_validate_json(sys.stdin.buffer.readline())
    try:
        serve_until_told(settings, _tell_address, told_by_stdin=True)
    except RouterError as error:
        _tell(error=str(error))


def _tell_address(server: RouterServer) -> None:
    _tell(url=server.url, admin_url=server.admin_url)


def _tell(**words: str) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
