"""A Hugging Face Hub on 127.0.0.1: the tests push and pull with the real client over real HTTP.

with LoopbackHub() as hub:
    os.environ["HF_ENDPOINT"] = hub.url  # before huggingface_hub is imported
    ...
    hub.files("tester/draft")["config.json"]  # bytes at the head of main

Written against huggingface_hub 2.4 with HF_HUB_DISABLE_XET=1: plain LFS uploads, one commit a push.
A model's key in `repos` is its id, a data set's is "datasets/" + id.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

USER = "tester"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".parquet", ".arrow", ".h5", ".msgpack", ".npz")
LFS_THRESHOLD = 10 * 2**20
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
HUB_ID = r"\w[\w.-]*(?:/\w[\w.-]*)?"
API = rf"/api/(?:models/|(?=datasets/))((?:datasets/)?{HUB_ID})"


class HubError(Exception):
    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Commit(dict):
    """One state of a repository, path -> bytes. `sha` depends on content and parent: client caches stay valid."""

    def __init__(self, files, parent=""):
        super().__init__(files)
        blobs = [f"{path} {etag(path, data)}" for path, data in sorted(self.items())]
        self.sha = hashlib.sha1("\n".join([parent, *blobs]).encode()).hexdigest()


def is_lfs(path, size, sample):
    return path.endswith(LFS_SUFFIXES) or size > LFS_THRESHOLD or b"\0" in sample


def etag(path, data):
    if is_lfs(path, len(data), data[:512]):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def card_errors(text):
    """The Hub refuses a card whose base_model or datasets are not ids of the Hub, such as local paths, and one whose
    metadata or results (model-index) cannot be read."""
    front = re.match(r"---\n(.*?)\n---", text, re.S)
    errors = metadata_errors(text) if front else []
    for key in "base_model", "datasets":
        named = re.search(rf"^{key}:(.*(?:\n *- .*)*)", front[1], re.M) if front else None
        values = re.split(r"\n *- |[\[\],]", named[1]) if named else []
        wrong = [value for value in (value.strip(" '\"") for value in values) if not re.fullmatch(HUB_ID + "|", value)]
        errors += [f'"{key}" with value "{value}" is not valid. Use an id from https://hf.co.' for value in wrong]
    return errors


def metadata_errors(text):
    """What the client's own reader says of the metadata, and results that are no numbers."""
    from huggingface_hub import ModelCard  # not at the top: conftest.py sets the environment before

    try:
        results = ModelCard(text).data.eval_results or []
    except Exception as error:  # of yaml, or ValueError
        return [f"the metadata cannot be read: {error}"]
    named = [result for result in results if not (result.task_type and result.dataset_type and result.metric_type)]
    wrong = named + [result for result in results if not isinstance(result.metric_value, (int, float))]
    return [f'"model-index" has a result that is not valid: {result}' for result in wrong]


def folder(path):
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}


class LoopbackHub:
    def __init__(self, folder=None):
        """`folder`: serve each folder/<owner>/<name> as a model with one commit."""
        self._lock = threading.RLock()
        self.reset()
        for path in sorted(Path(folder).glob("*/*")) if folder else []:
            self.add(f"{path.parent.name}/{path.name}", path)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self):
        # shutdown() waits for the end of a poll.
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    __enter__ = start

    def __exit__(self, *exc):
        self.stop()

    def reset(self):
        with self._lock:
            self.repos = {}  # id -> [Commit, ...] in order of arrival, all branches
            self.branches = {}  # id -> {branch: Commit}
            self.objects = {}  # sha256 -> bytes, the LFS store
            self.requests = []  # "POST /api/repos/create", ...
            self.token = None  # when set, the only token that may write; another one may not even read
            self._uploads_left = None

    def fail_uploads_after(self, n):
        """Network loss: after n more uploads (an LFS object, a commit) the connection closes without an answer."""
        self._uploads_left = n

    def add(self, repo, files):
        """A repository from a folder or a dict path -> bytes, without the client."""
        if isinstance(files, (str, Path)):
            root = Path(files)
            files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        self.branches[repo] = {}
        self.repos[repo] = []
        self._append(repo, "main", {".gitattributes": GITATTRIBUTES, **files})

    def files(self, repo, revision="main"):
        if repo not in self.repos:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if revision in self.branches[repo]:
            return self.branches[repo][revision]
        for commit in self.repos[repo]:
            if commit.sha == revision:
                return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def _append(self, repo, branch, files):
        parent = self.branches[repo].get(branch)
        commit = self.branches[repo][branch] = Commit(files, parent.sha if parent else "")
        self.repos[repo].append(commit)
        return commit

    # Routes: (request, groups of the pattern) -> (status, JSON or bytes[, headers])

    def whoami(self, request):
        return 200, {"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def validate_yaml(self, request):
        errors = card_errors(json.loads(request.body)["content"])
        return (400 if errors else 200), {"errors": [{"message": e} for e in errors], "warnings": []}

    def create_repo(self, request):
        body = json.loads(request.body)
        prefix = {"model": "", "dataset": "datasets/"}[body.get("type") or "model"]
        repo = f"{prefix}{body.get('organization') or USER}/{body['name']}"
        reply = {"url": f"{self.url}/{repo}"}  # the client reads url from a 409 too
        if repo in self.repos:
            return 409, reply | {"error": "You already created this repo"}
        self.add(repo, {})
        return 200, reply

    def create_branch(self, request, repo, branch):
        start = self.files(repo, json.loads(request.body).get("startingPoint", "main"))
        if branch in self.branches[repo]:
            return 409, {"error": f"Reference already exists: {branch}"}
        self.branches[repo][branch] = start
        return 200, {}

    def preupload(self, request, repo, revision):
        commit = self.files(repo, revision)
        files = json.loads(request.body)["files"]
        for file in files:
            path, sample = file["path"], base64.b64decode(file.pop("sample"))
            file["uploadMode"] = "lfs" if is_lfs(path, file["size"], sample) else "regular"
            file["shouldIgnore"] = False
            file["oid"] = etag(path, commit[path]) if path in commit else None  # the client leaves out what is equal
        return 200, {"files": files}

    def lfs_batch(self, request, repo):
        self.files(repo)
        objects = json.loads(request.body)["objects"]
        for item in objects:
            if item["oid"] not in self.objects:  # without actions the client takes it as already there
                item["actions"] = {"upload": {"href": f"{self.url}/lfs-objects/{item['oid']}"}}
        return 200, {"transfer": "basic", "objects": objects}

    def lfs_put(self, request, oid):
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The object does not have this sha256")
        self.objects[oid] = request.body
        return 200, {}

    def commit(self, request, repo, branch):
        with self._lock:
            files = dict(self.files(repo, branch))
            for line in request.body.splitlines():
                key, value = json.loads(line).values()
                path = value.get("path")
                if key == "file":
                    files[path] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    if value["oid"] not in self.objects:
                        raise HubError(400, f"LFS pointer to an object that was never uploaded: {path}")
                    files[path] = self.objects[value["oid"]]
                elif key in ("deletedFile", "deletedFolder"):
                    inside = path.rstrip("/") + "/"
                    gone = [f for f in files if f == path or key == "deletedFolder" and f.startswith(inside)]
                    if not gone:
                        raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
                    files = {f: data for f, data in files.items() if f not in gone}
                elif key != "header":
                    raise HubError(400, f"Unknown operation {key}")
            if errors := card_errors(files.get("README.md", b"").decode()):
                raise HubError(400, errors[0])
            sha = self._append(repo, branch, files).sha
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{sha}", "commitOid": sha}

    def info(self, request, repo, revision="main"):
        commit = self.files(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit)]
        name = repo.removeprefix("datasets/")
        return 200, {"id": name, "sha": commit.sha, "private": False, "tags": [], "siblings": siblings}

    def tree(self, request, repo, revision, inside=""):
        prefix = inside and inside + "/"
        files = [entry for entry in self._entries(repo, revision) if entry["path"].startswith(prefix)]
        if inside and not files:
            raise HubError(404, f"{inside} does not exist on {revision}", "EntryNotFound")
        if "recursive=true" in request.path.lower():
            return 200, files
        direct = [entry for entry in files if "/" not in entry["path"].removeprefix(prefix)]
        deeper = [entry["path"].removeprefix(prefix).split("/")[0] for entry in files if entry not in direct]
        return 200, direct + [folder(prefix + name) for name in sorted(set(deeper))]

    def paths_info(self, request, repo, revision):
        wanted = parse_qs(request.body.decode())["paths"]
        entries = self._entries(repo, revision)
        files = [entry for entry in entries if entry["path"] in wanted]
        return 200, files + [folder(w) for w in wanted if any(e["path"].startswith(w + "/") for e in entries)]

    def resolve(self, request, repo, revision, path):
        commit = self.files(repo, revision)
        headers = {"X-Repo-Commit": commit.sha}  # on a 404 too: the client remembers that this commit lacks the file
        if path not in commit:
            return 404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"}
        # The client asks for a Range only to resume, and takes a whole file for an answer.
        return 200, commit[path], headers | {"ETag": f'"{etag(path, commit[path])}"'}

    def _entries(self, repo, revision):
        entries = []
        for path, data in sorted(self.files(repo, revision).items()):
            oid = etag(path, data)
            entry = {"type": "file", "path": path, "size": len(data), "oid": oid[:40]}
            lfs = {"lfs": {"oid": oid, "size": len(data), "pointerSize": 134}} if len(oid) == 64 else {}
            entries.append(entry | lfs)
        return entries

    ROUTES = [
        ("GET", r"/api/whoami-v2", whoami),
        ("POST", r"/api/validate-yaml", validate_yaml),
        ("POST", r"/api/repos/create", create_repo),
        ("POST", API + r"/branch/([^/]+)", create_branch),
        ("POST", API + r"/preupload/([^/]+)", preupload),
        ("POST", r"/(.+)\.git/info/lfs/objects/batch", lfs_batch),
        ("PUT", r"/lfs-objects/(\w+)", lfs_put),
        ("POST", API + r"/commit/([^/]+)", commit),
        ("POST", API + r"/paths-info/([^/]+)", paths_info),
        ("GET", API + r"/tree/([^/]+)(?:/(.+))?", tree),
        ("GET", API + r"(?:/revision/([^/]+))?", info),
        ("GET|HEAD", rf"/((?:datasets/)?{HUB_ID})/resolve/([^/]+)/(.+)", resolve),
    ]

    def answer(self, request):
        path = urlsplit(request.path).path
        for methods, pattern, route in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and request.command in methods.split("|"):
                self._check_token(request, route)
                if route in (LoopbackHub.lfs_put, LoopbackHub.commit):
                    self._count_upload()
                return route(self, request, *[unquote(group) for group in match.groups() if group])
        raise HubError(404, f"No such route: {request.command} {path}")

    def _check_token(self, request, route):
        given = request.headers.get("Authorization")
        # A signed address needs no token.
        if not self.token or given == f"Bearer {self.token}" or route is LoopbackHub.lfs_put:
            return
        if given:
            raise HubError(401, "Invalid credentials in Authorization header")
        if request.command == "POST" and route is not LoopbackHub.validate_yaml:
            raise HubError(401, "Invalid username or password.")

    def _count_upload(self):
        with self._lock:
            if self._uploads_left == 0:
                raise ConnectionAbortedError
            if self._uploads_left:
                self._uploads_left -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: 40 ms a request otherwise

    def handle_request(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.hub.requests.append(f"{self.command} {self.path}")
        try:
            status, body, headers = (*self.server.hub.answer(self), {})[:3]
        except ConnectionAbortedError:
            self.close_connection = True
            return
        except HubError as error:
            status, body, headers = error.status, {"error": error.message}, {"X-Error-Message": error.message}
            headers |= {"X-Error-Code": error.code} if error.code else {}
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = headers | {"Content-Type": "application/json"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def log_message(self, *args):
        pass
