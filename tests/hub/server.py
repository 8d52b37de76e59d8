"""A Hugging Face hub small enough to run inside a test: what the real client asks for, and every way to let it down.

State is plain data: `FakeHub.repos` holds repos, a repo holds commits, a commit holds files. An endpoint is a method
named in `ROUTES`; one more endpoint is one more line there. uploads.py holds those that change a repo.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from uploads import Response, Uploads, git_id, is_lfs, json_response, refuse

Files = dict[str, bytes]


@dataclass
class Repo:
    """`commits` maps a 40-hex commit to its files, `refs` a branch or tag to its commit.

    A private repo is seen only by the tokens in `readers`; of a gated one all see the listing and only they the files.
    `listed_sizes` are sizes the listing gives instead of the true ones.
    """

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)
    listed_sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" matches `pattern`, instead of a good answer.

    status: answered as it is. cut: the connection ends after that many bytes of the body, at -1 before any answer; the
    request has had its effect. lost: it ends after that many bytes of the request's body, which then has none.
    reset: it ends with a TCP reset instead of an orderly close. skip: so many matching requests go well before.
    """

    pattern: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    lost: int | None = None
    reset: bool = False
    skip: int = 0


class FakeHub(Uploads):
    """Use as a context manager; `url` is the endpoint, `log` every request in order as "METHOD path"."""

    ROUTES = (
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)", "model_info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)", "model_info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("HEAD|GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "resolve"),
        *Uploads.ROUTES,
    )

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.log: list[str] = []
        self.ranges: list[str] = []
        self.faults: list[Fault] = []
        self.after: list[tuple[str, Callable[[], object]]] = []
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repo: str, files: Files, *, branch: str = "main") -> str:
        """Add a commit that holds exactly `files` and move the branch to it; the repo is made when it is new."""
        home = self.repos.setdefault(repo, Repo())
        seed = repr((len(home.commits), repo, branch, sorted(files.items())))
        commit = sha1(seed.encode()).hexdigest()
        home.commits[commit] = dict(files)
        home.refs[branch] = commit
        return commit

    def fail(self, pattern: str, *, times: int = 1, **fault) -> None:
        """Let the next `times` requests that match `pattern` fail; see Fault."""
        self.faults.append(Fault(pattern, times, **fault))

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, sorted, one entry a request."""
        return sorted(line.split("/resolve/")[1].split("/", 1)[1] for line in self.log if line.startswith("GET /")
                      and "/resolve/" in line)  # fmt: skip

    def fault(self, line: str) -> Fault | None:
        """What is to happen to the request that "METHOD path" names, which counts as one of the fault's."""
        with self._lock:
            self.log.append(line)
            for fault in self.faults:
                if re.search(fault.pattern, line) and fault.times > 0:
                    if fault.skip == 0:
                        fault.times -= 1
                        return fault
                    fault.skip -= 1
        return None

    def answer(self, request: Request, fault: Fault | None) -> tuple[Response, Fault | None]:
        """The answer to a request, and the fault that spoils its delivery, if any."""
        line = f"{request.method} {request.path}"
        if "Range" in request.headers:
            self.ranges.append(request.headers["Range"])
        if fault is not None and fault.status is not None:
            return Response(fault.status, fault.body, fault.headers), None
        with self._changing if request.method in ("POST", "PUT") else nullcontext():
            response = self._route(request)
        with self._lock:
            due = [call for pattern, call in self.after if re.search(pattern, line)]
            self.after = [(pattern, call) for pattern, call in self.after if not re.search(pattern, line)]
        for call in due:
            call()
        return response, fault

    def _route(self, request: Request) -> Response:
        path = urlsplit(request.path).path
        for methods, pattern, action in self.ROUTES:
            if request.method in methods.split("|") and (match := re.fullmatch(pattern, path)):
                return getattr(self, action)(request, **{k: unquote(v) for k, v in match.groupdict().items()})
        return refuse(404, "", "no such page")

    def _find(self, request: Request, repo: str, revision: str, *, content: bool) -> tuple[Repo, str] | Response:
        """The repo and commit a request may see, or the refusal the real hub would give."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            return refuse(401, "", "Invalid credentials in Authorization header")
        home = self.repos.get(repo)
        if home is None or (home.private and token not in home.readers):
            return refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if content and home.gated and token not in home.readers:
            return refuse(403 if token else 401, "GatedRepo", f"Access to model {repo} is restricted")
        commit = home.refs.get(revision, revision)
        if commit not in home.commits:
            return refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return home, commit

    def model_info(self, request: Request, repo: str, revision: str = "main") -> Response:
        found = self._find(request, repo, revision, content=False)
        if isinstance(found, Response):
            return found
        home, commit = found
        siblings = []
        for name, data in home.commits[commit].items():
            size = home.listed_sizes.get(name, len(data))
            entry = {"rfilename": name, "size": size, "blobId": git_id(data)}
            if is_lfs(name):
                entry["lfs"] = {"sha256": sha256(data).hexdigest(), "size": size, "pointerSize": 130}
            siblings.append(entry)
        return json_response({"id": repo, "sha": commit, "private": home.private, "tags": [], "siblings": siblings})

    def tree(self, request: Request, repo: str, revision: str) -> Response:
        found = self._find(request, repo, revision, content=False)
        if isinstance(found, Response):
            return found
        home, commit = found
        entries = []
        for name, data in home.commits[commit].items():
            entry = {"type": "file", "path": name, "size": len(data), "oid": git_id(data)}
            if is_lfs(name):
                entry["lfs"] = {"oid": sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return json_response(entries)

    def resolve(self, request: Request, repo: str, revision: str, name: str) -> Response:
        found = self._find(request, repo, revision, content=True)
        if isinstance(found, Response):
            return found
        home, commit = found
        data = home.commits[commit].get(name)
        if data is None:
            return refuse(404, "EntryNotFound", f"{name} does not exist", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{git_id(data)}"'}
        if is_lfs(name):
            digest = sha256(data).hexdigest()
            headers |= {"ETag": f'"{digest}"', "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted is None:
            return Response(200, data, headers)
        begin, end = int(wanted[1]), int(wanted[2] or len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        return Response(206, data[begin : end + 1], headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def handle_any(self) -> None:
        fault = self.hub.fault(f"{self.command} {self.path}")
        if fault is not None and fault.lost is not None:
            self._body(fault.lost)
            self._hang_up(fault)
            return
        body = self._body()
        response, fault = self.hub.answer(Request(self.command, self.path, _Headers(self.headers), body), fault)
        if fault is not None and fault.cut is not None and fault.cut < 0:
            self._hang_up(fault)
            return
        self.send_response(response.status)
        for key, value in {"Content-Length": str(len(response.body)), **response.headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(response.body if fault is None else response.body[: fault.cut])
        except ConnectionError:  # the client went away, as a killed one does
            self.close_connection = True
            return
        if fault is not None:
            self._hang_up(fault)

    def _body(self, most: int | None = None) -> bytes:
        """The request's body, or its first `most` bytes."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(length if most is None else min(length, most))
        body = b""
        while (length := int(self.rfile.readline(), 16)) and (most is None or len(body) < most):
            body += self.rfile.read(length)
            self.rfile.readline()
        if length == 0:
            self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def _hang_up(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.reset:
            # Lingering for no time makes close() send a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Silent: the tests read FakeHub.log."""


class _Headers(dict):
    """Headers found by any spelling of their name."""

    def __init__(self, items) -> None:
        super().__init__({key.lower(): value for key, value in items.items()})

    def get(self, key: str, default=None):
        return super().get(key.lower(), default)

    def __getitem__(self, key: str) -> str:
        return super().__getitem__(key.lower())

    def __contains__(self, key: object) -> bool:
        return super().__contains__(str(key).lower())
