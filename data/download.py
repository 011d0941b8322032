"""Downloads over https: complete and verified, or nothing.

Anything that can hang (name lookup, connecting, reading) happens in a separate thread. The caller
stops waiting at a deadline, whatever the thread is doing then.
"""

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from tqdm import tqdm

from common.files import atomic_file

STALL_TIMEOUT = 9.0  # seconds without a byte, even before the first one
MAX_SECONDS = 300.0
MAX_BYTES = 100_000_000


class Unavailable(Exception):
    """A text that cannot be obtained; the message says why."""


def download(url: str, sha256: str, target: Path) -> None:
    """Store the content of `url` at `target` if its SHA-256 is `sha256`, with a progress bar.

    Only https is used, even after redirects. Gives up after STALL_TIMEOUT without progress, after
    MAX_SECONDS and after MAX_BYTES. `target` appears atomically, once the content is complete and
    verified. Raises Unavailable.
    """
    content = bytearray()
    with tqdm(desc=target.parent.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for chunk in _chunks(url):
            content += chunk
            bar.update(len(chunk))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise Unavailable(f"wrong SHA-256: {len(content):,} bytes with {found}, not {sha256}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target, shared=True) as file:
            file.write(content)
    except OSError as error:
        raise Unavailable(f"cannot be stored at {target}: {error.strerror}") from error


def _chunks(url: str) -> Iterator[bytes]:
    """Yield the content of `url` as it arrives from a thread that may be abandoned."""
    queue: SimpleQueue[bytes | Exception] = SimpleQueue()
    threading.Thread(target=_fetch, args=(url, queue), daemon=True).start()
    while True:
        try:
            item = queue.get(timeout=STALL_TIMEOUT)
        except Empty:
            raise Unavailable(f"no data for {STALL_TIMEOUT:g} seconds") from None
        if isinstance(item, Exception):
            reason = item.reason if type(item) is URLError else item
            raise Unavailable(str(reason)[:200] or type(item).__name__) from item
        if not item:
            return
        yield item


def _fetch(url: str, queue: SimpleQueue) -> None:
    """Put the content of `url` into the queue in chunks, then b"" or an exception."""
    deadline, left = time.monotonic() + MAX_SECONDS, MAX_BYTES
    try:
        with build_opener(_HttpsOnly).open(url, timeout=STALL_TIMEOUT) as response:
            while chunk := response.read1(1 << 16):
                queue.put(chunk)
                left -= len(chunk)
                if left < 0:
                    raise Unavailable(f"larger than {MAX_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise Unavailable(f"not complete after {MAX_SECONDS:g} seconds")
        queue.put(b"")
    except Exception as error:
        queue.put(error)


class _HttpsOnly(HTTPRedirectHandler):
    def redirect_request(self, request, response, code, message, headers, url):
        if urlsplit(url).scheme != "https":
            raise URLError(f"redirected to {url}, which is not https")
        return super().redirect_request(request, response, code, message, headers, url)
