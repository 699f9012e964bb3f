"""A Hub on this machine: repositories of models that `huggingface_hub` and `transformers` push to and load from.

It speaks what `huggingface_hub` 2.4 says without Xet: making and deleting repositories, pre-upload, LFS batch and
upload, commits (on branches, and as pull requests), who the token belongs to, information about repositories, lists of
files, and downloads (HEAD, GET, ranges; large files through a redirect, as on the real one). Files that end like
weights are LFS files. Every commit is kept, so a test can say what was pushed, and when.

    with HubServer(directory) as hub:
        subprocess.run([sys.executable, "push.py"], env={**os.environ, **hub.environment(home)})
        hub.files("tester/model")["config.json"]

`huggingface_hub` reads its environment when it is imported, so it is other processes that speak to this Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

USER = "tester"
TOKEN = "hf_localtoken"

_LFS = (".safetensors", ".bin", ".pt", ".gguf", ".pth")


@dataclass(frozen=True)
class Blob:
    """A file's content: where it is kept, and what the Hub calls it."""

    path: Path
    size: int
    oid: str
    is_lfs: bool


@dataclass(frozen=True)
class Commit:
    """One commit: what it says, and every file there is after it."""

    oid: str
    title: str
    description: str
    files: dict[str, Blob]
    parent: str | None


@dataclass
class Repo:
    """A repository: commits by id, and what branches and pull requests point to."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> Commit:
        if revision not in self.refs and revision not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"no revision '{revision}'")
        return self.commits[self.refs.get(revision, revision)]

    def add(self, ref: str, title: str, description: str, files: dict[str, Blob], parent: str | None) -> Commit:
        listed = json.dumps([len(self.commits), title, {name: blob.oid for name, blob in sorted(files.items())}])
        commit = Commit(hashlib.sha1(listed.encode()).hexdigest(), title, description, files, parent)
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit


class RefusedError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class HubServer:
    """The server, and what a test may ask it.

    Attributes:
        url: For `HF_ENDPOINT`.
        repos: By name, such as "tester/model".
        requests: Every request so far, as "PUT /lfs/...".
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        self.directory.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables with which a process speaks to this Hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """From the first to the last; the first one, that of the empty repository, is left out."""
        repo = self.repos[repo_id]
        found = [repo.commit(revision)]
        while found[0].parent is not None:
            found.insert(0, repo.commits[found[0].parent])
        return found[1:]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What is in a repository."""
        files = self.repos[repo_id].commit(revision).files
        return {name: blob.path.read_bytes() for name, blob in sorted(files.items())}

    def store(self, content: bytes, is_lfs: bool) -> Blob:
        """Keep a file's content, once."""
        sha256 = hashlib.sha256(content).hexdigest()
        path = self.directory / sha256
        if not path.exists():
            path.write_bytes(content)
        oid = sha256 if is_lfs else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return Blob(path, len(content), oid, is_lfs)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.body = b"".join(self._body())
        try:
            with self.hub.lock:
                self.hub.requests.append(f"{self.command} {url.path}")
                self._route(url.path)
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self._send(refused.status, json.dumps({"error": str(refused)}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _route(self, path: str) -> None:
        for pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                answer(self, **{name: unquote(value) for name, value in found.groupdict().items()})
                return
        raise RefusedError(404, "NotFound", f"this Hub does not answer {self.command} {path}")

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Unauthorized", "Invalid credentials in Authorization header")

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise RefusedError(404, "RepoNotFound", f"no repository '{name}'")
        return repo

    def who(self) -> None:
        self._check_token()
        self._json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        self._check_token()
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            self._send(409, json.dumps(answer).encode(), {"X-Error-Message": "You already created this model repo"})
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[name] = Repo(private)
        self.hub.repos[name].add("main", "initial commit", "", {}, None)
        self._json(answer)

    def delete(self) -> None:
        self._check_token()
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        self._repo(name)
        del self.hub.repos[name]
        self._json({})

    def validate(self) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        self._check_token()
        there = self._repo(repo).commit(revision).files
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(_LFS) else "regular",
                "shouldIgnore": False,
                "oid": there[file["path"]].oid if file["path"] in there else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": modes})

    def lfs_batch(self, repo: str) -> None:
        self._check_token()
        self._repo(repo)
        objects = json.loads(self.body)["objects"]
        for entry in objects:
            if not (self.hub.directory / entry["oid"]).exists():
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if self.hub.store(self.body, is_lfs=True).oid != oid:
            raise RefusedError(400, "BadRequest", f"the content is not that of '{oid}'")
        self._send(200)

    def commit(self, repo: str, revision: str) -> None:
        self._check_token()
        found = self._repo(repo)
        parent = found.commit(revision)
        files = dict(parent.files)
        header: dict[str, str] = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
            elif entry["key"] == "file":
                files[value["path"]] = self.hub.store(base64.b64decode(value["content"]), is_lfs=False)
            elif entry["key"] == "lfsFile":
                stored = self.hub.directory / value["oid"]
                if not stored.exists():
                    raise RefusedError(400, "BadRequest", f"'{value['path']}' was not uploaded")
                files[value["path"]] = Blob(stored, stored.stat().st_size, value["oid"], is_lfs=True)
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
            else:
                raise RefusedError(400, "BadRequest", f"this Hub knows no '{entry['key']}'")
        answer: dict[str, Any] = {}
        ref = revision
        if self.query.get("create_pr") == "1":
            number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        commit = found.add(ref, header["summary"], header.get("description", ""), files, parent.oid)
        answer["success"] = True
        answer["commitOid"] = commit.oid
        answer["commitUrl"] = f"{self.hub.url}/{repo}/commit/{commit.oid}"
        self._json(answer)

    def branch(self, repo: str, branch: str) -> None:
        self._check_token()
        found = self._repo(repo)
        if branch in found.refs:
            self._send(409)
            return
        found.refs[branch] = found.commit(json.loads(self.body or b"{}").get("startingPoint", "main")).oid
        self._json({})

    def info(self, repo: str, revision: str = "main") -> None:
        found = self._repo(repo)
        commit = found.commit(revision)
        siblings = [{"rfilename": name} for name in sorted(commit.files)]
        self._json({"id": repo, "sha": commit.oid, "private": found.private, "siblings": siblings, "tags": []})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        files = self._repo(repo).commit(revision).files
        self._json([_entry(name, files[name]) for name in sorted(files) if name.startswith(folder.lstrip("/"))])

    def paths_info(self, repo: str, revision: str) -> None:
        files = self._repo(repo).commit(revision).files
        asked = json.loads(self.body)["paths"]
        self._json([_entry(name, files[name]) for name in asked if name in files])

    def list_refs(self, repo: str) -> None:
        refs = [{"name": name, "ref": name, "targetCommit": oid} for name, oid in self._repo(repo).refs.items()]
        pulls = [ref for ref in refs if ref["name"].startswith("refs/pr/")]
        self._json({"branches": [ref for ref in refs if ref not in pulls], "tags": [], "pullRequests": pulls})

    def resolve(self, repo: str, revision: str, file: str) -> None:
        commit = self._repo(repo).commit(revision)
        blob = commit.files.get(file)
        if blob is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._send(404, b"", {**missing, "X-Repo-Commit": commit.oid})
            return
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if blob.is_lfs:
            linked = {"X-Linked-Size": str(blob.size), "X-Linked-Etag": f'"{blob.oid}"'}
            # Another host, as on the real Hub: nobody sends it the token.
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            self._send(302, b"", {**headers, **linked, "Location": f"{elsewhere}/lfs/{blob.oid}"})
        else:
            self._content(blob.path, headers)

    def lfs_download(self, oid: str) -> None:
        if not (self.hub.directory / oid).exists():
            raise RefusedError(404, "EntryNotFound", f"no file '{oid}'")
        self._content(self.hub.directory / oid, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _content(self, path: Path, headers: dict[str, str]) -> None:
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._send(200, content, headers)
            return
        start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
        if start >= len(content):
            raise RefusedError(416, "RangeNotSatisfiable", f"the file has {len(content)} bytes")
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._send(206, content[start:stop], {**headers, **span})


def _entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": blob.size, "oid": blob.oid}
    return {**entry, "lfs": {"oid": blob.oid, "size": blob.size, "pointerSize": 130}} if blob.is_lfs else entry


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"GET /api/whoami-v2", _Handler.who),
    (r"POST /api/repos/create", _Handler.create),
    (r"DELETE /api/repos/delete", _Handler.delete),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
    (rf"POST /api/models/{_REPO}/branch/(?P<branch>[^/]+)", _Handler.branch),
    (rf"POST /api/models/{_REPO}/paths-info/{_REVISION}", _Handler.paths_info),
    (rf"GET /api/models/{_REPO}/tree/{_REVISION}(?P<folder>(/.*)?)", _Handler.tree),
    (rf"GET /api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    (rf"GET /api/models/{_REPO}/refs", _Handler.list_refs),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_upload),
    (r"(GET|HEAD) /lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_download),
    (rf"(GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<file>.+)", _Handler.resolve),
]
