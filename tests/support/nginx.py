"""nginx, a web server that is not ours, with a folder; tests are skipped without it."""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import wait_until

_CONFIGURATION = """
daemon off;
master_process off;  # what answers is this user, whose folders others may not read
pid nginx.pid;
error_log error.log;
events {{}}
http {{
    access_log off;
    sendfile on;
    default_type application/octet-stream;
    {temporary}
    server {{
        listen 127.0.0.1:{port};
        root "{root}";
    }}
}}
"""
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_USUAL_FOLDERS = "/usr/sbin:/usr/local/sbin"
"""Where it lies, which users often have not in PATH."""


@contextlib.contextmanager
def nginx_of(root: Path, own: Path) -> Iterator[str]:
    """Serve the folder `root` by nginx, whose files are in `own`; yield its address."""
    program = shutil.which("nginx") or shutil.which("nginx", path=_USUAL_FOLDERS)
    if program is None:
        pytest.skip("nginx is not installed")
    own.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    temporary = " ".join(f"{name}_temp_path {name};" for name in _TEMPORARY)
    text = _CONFIGURATION.format(temporary=temporary, port=port, root=root)
    (own / "nginx.conf").write_text(text)
    command = (program, "-p", own, "-c", "nginx.conf", "-e", "error.log")
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: process.poll() is not None or _answers(port))
            assert process.poll() is None, (own / "error.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
