"""The part of the fake hub that changes repos: create, branch, preupload, LFS batch and multipart upload, commit."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Response:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Uploads:
    """Large files go into `objects` by their digest, as the LFS protocol has it; a commit then names them.

    Files of more than `part` bytes are uploaded in parts of that size. Tokens in `read_only` may not write.
    """

    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})", "put"),
        ("POST", r"/complete/(?P<oid>[0-9a-f]{64})", "complete"),
        ("POST", r"/verify", "verify_upload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "add_commit"),
    )

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: list[dict[int, bytes]] = []
        self.part = 1 << 40
        self.read_only: set[str] = set()

    def uploads(self) -> list[str]:
        """Digests of the large files whose content came in whole, in order, one entry an upload."""
        whole = (re.match(r"PUT /upload/([0-9a-f]+)$|POST /complete/([0-9a-f]+)", line) for line in self.log)
        return [found[1] or found[2] for found in whole if found]

    def _writer(self, request: Any) -> Response | None:
        """The refusal of a request that may not write, or None."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            return refuse(401, "", "Invalid username or password.")
        if token in self.read_only:
            return refuse(403, "", "you don't have the rights to write to this namespace")
        return None

    def create(self, request: Any) -> Response:
        if refused := self._writer(request):
            return refused
        asked = json.loads(request.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.repos:
            return refuse(409, "", "You already created this model repo")
        self.commit(repo, {".gitattributes": b"*.bin filter=lfs diff=lfs merge=lfs -text\n"})
        self.repos[repo].private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repos[repo].readers = set(self.tokens)
        return json_response({"url": f"{self.url}/{repo}", "name": repo, "id": repo})

    def validate_yaml(self, request: Any) -> Response:
        found = re.match(r"---\n(.*?)\n---\n", json.loads(request.body)["content"], re.DOTALL)
        if found and "license: bad" in found[1]:
            errors = [{"message": '"license" must be one of [apache-2.0, mit, other]'}]
            return Response(
                400, json.dumps({"errors": errors, "warnings": []}).encode(), {"Content-Type": "application/json"}
            )
        return json_response({"errors": [], "warnings": []})

    def branch(self, request: Any, repo: str, branch: str) -> Response:
        if refused := self._writer(request):
            return refused
        home = self.repos[repo]
        if branch in home.refs:
            return refuse(409, "", "Reference already exists")
        home.refs[branch] = home.refs["main"]
        return json_response({})

    def preupload(self, request: Any, repo: str, revision: str) -> Response:
        found = self._write(request, repo, revision)
        if isinstance(found, Response):
            return found
        home, head = found
        files = []
        for file in json.loads(request.body)["files"]:
            old = home.commits[head].get(file["path"])
            lfs = is_lfs(file["path"]) or b"\0" in base64.b64decode(file["sample"])
            entry = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if old is not None:
                entry["oid"] = sha256(old).hexdigest() if lfs else git_id(old)
            files.append(entry)
        return json_response({"files": files})

    def lfs_batch(self, request: Any, repo: str) -> Response:
        if refused := self._writer(request):
            return refused
        objects = []
        for wanted in json.loads(request.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.objects:
                upload: dict[str, Any] = {"href": f"{self.url}/upload/{oid}"}
                if size > self.part:
                    # As in S3, every upload in parts is one of its own, also of equal content.
                    number, count = len(self.parts), -(-size // self.part)
                    self.parts.append({})
                    upload["href"] = f"{self.url}/complete/{oid}?upload={number}"
                    url = f"{self.url}/upload/{oid}?upload={number}&part="
                    upload["header"] = {str(i + 1): f"{url}{i + 1}" for i in range(count)}
                    upload["header"]["chunk_size"] = str(self.part)
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/verify"}}
            objects.append(answer)
        return json_response({"transfer": "basic", "objects": objects})

    def put(self, request: Any, oid: str) -> Response:
        query = parse_qs(urlsplit(request.path).query)
        if "part" in query:
            self.parts[int(query["upload"][0])][int(query["part"][0])] = request.body
            return Response(200, b"", {"ETag": f'"{sha1(request.body).hexdigest()}"'})
        return self._store(oid, request.body)

    def complete(self, request: Any, oid: str) -> Response:
        parts = self.parts[int(parse_qs(urlsplit(request.path).query)["upload"][0])]
        named = [part["partNumber"] for part in json.loads(request.body)["parts"]]
        return self._store(oid, b"".join(parts.get(number, b"") for number in named))

    def _store(self, oid: str, data: bytes) -> Response:
        if sha256(data).hexdigest() != oid:
            return refuse(400, "", "the content does not have the digest it was announced with")
        self.objects[oid] = data
        return json_response({})

    def verify_upload(self, request: Any) -> Response:
        asked = json.loads(request.body)
        right = len(self.objects.get(asked["oid"], b"")) == asked["size"]
        return json_response({}) if right else refuse(404, "", "no such object")

    def add_commit(self, request: Any, repo: str, revision: str) -> Response:
        found = self._write(request, repo, revision)
        if isinstance(found, Response):
            return found
        home, head = found
        files = dict(home.commits[head])
        for line in request.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header" and value.get("parentCommit", head) != head:
                return refuse(412, "", "A commit has happened since. Please refresh and try again.")
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile" and value["oid"] not in self.objects:
                return refuse(400, "", f"{value['path']}: the large file was not uploaded")
            elif key == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        commit = self.commit(repo, files, branch=revision)
        return json_response({"commitUrl": f"{self.url}/{repo}/commit/{commit}", "commitOid": commit})

    def _write(self, request: Any, repo: str, revision: str) -> tuple[Any, str] | Response:
        return self._writer(request) or self._find(request, repo, revision, content=False)


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".so")) or name == "tokenizer.json"


def git_id(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


def json_response(value: object) -> Response:
    return Response(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def refuse(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    found = {"X-Error-Message": message, **(headers or {})}
    if code:
        found["X-Error-Code"] = code
    return Response(status, json.dumps({"error": message}).encode(), {"Content-Type": "application/json", **found})
