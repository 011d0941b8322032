"""One text from an https address: whole and verified, or not at all.

What may hang (looking up the name, connecting, reading) happens in a thread of its own; whoever
waits for it stops waiting at a deadline, whatever the thread is stuck in.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from tqdm import tqdm

from common.errors import escape
from common.files import atomic_file

# seconds in which something must come: from the start to the first byte, then from byte to byte
PATIENCE = 9.0
LIMIT = 300.0  # seconds for a whole download that does make progress
CAP = 100_000_000  # bytes


class Unavailable(Exception):
    """A text that cannot be had; the message says why."""


def download(url: str, sha256: str, target: Path, notify: Callable[[str], None]) -> None:
    """Store what `url` holds at `target`, if its SHA-256 is `sha256`; a bar on the terminal shows
    progress.

    Only https is spoken, after redirects too. Without a network this gives up within PATIENCE
    seconds, name look-up included; with one that makes progress, after LIMIT seconds or CAP bytes.
    Until the text is complete and verified nothing is written, and `target` appears in one step.
    Raises Unavailable; `notify` hears of a wrong digest.
    """
    content = bytearray()
    with tqdm(desc=target.parent.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for chunk in _arriving(url):
            content += chunk
            bar.update(len(chunk))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        notify(
            escape(f"{url}: {len(content):,} bytes came, with SHA-256 {found} instead of {sha256}")
        )
        raise Unavailable("wrong SHA-256")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file:
            file.write(content)
    except OSError as error:
        raise Unavailable(f"cannot be stored at {target}: {error.strerror}") from error


def _arriving(url: str) -> Iterator[bytes]:
    """The content of `url` as it comes, handed over by a thread that may be abandoned."""
    arrivals: SimpleQueue[bytes | Exception] = SimpleQueue()
    threading.Thread(target=_fetch, args=(url, arrivals), daemon=True).start()
    while True:
        try:
            arrived = arrivals.get(timeout=PATIENCE)
        except Empty:
            raise Unavailable(f"nothing came for {PATIENCE:g} seconds") from None
        if isinstance(arrived, Exception):
            reason = arrived.reason if type(arrived) is URLError else arrived
            raise Unavailable(str(reason)[:200] or type(arrived).__name__) from arrived
        if not arrived:
            return
        yield arrived


def _fetch(url: str, arrivals: SimpleQueue) -> None:
    """Put the content of `url` into `arrivals` piece by piece, then b"" or the exception that ended
    it.
    """
    end, left = time.monotonic() + LIMIT, CAP
    try:
        with build_opener(_HttpsOnly).open(url, timeout=PATIENCE) as response:
            while chunk := response.read1(1 << 16):
                arrivals.put(chunk)
                left -= len(chunk)
                if left < 0:
                    raise Unavailable(f"larger than {CAP:,} bytes")
                if time.monotonic() > end:
                    raise Unavailable(f"not complete after {LIMIT:g} seconds")
        arrivals.put(b"")
    except Exception as error:
        arrivals.put(error)


class _HttpsOnly(HTTPRedirectHandler):
    def redirect_request(self, request, response, code, message, headers, url):
        if urlsplit(url).scheme != "https":
            raise URLError(f"redirected to {url}, which is not https")
        return super().redirect_request(request, response, code, message, headers, url)
