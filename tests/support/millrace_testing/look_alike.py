"""A look-alike of the Kubernetes API, enough for a real Helm to install, upgrade, roll back and test against.

NOT a cluster: it checks objects with Kubernetes' schemas, stores them, and says at once that pods have succeeded. There
is no admission, no controller, no scheduler and no kubelet, so it proves nothing about those.
"""

import base64
import copy
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

import kubernetes_validate

Object = dict[str, Any]

_KINDS = {
    "v1": ["Secret", "ConfigMap", "Service", "ServiceAccount", "Pod", "Namespace"],
    "apps/v1": ["StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy", "Ingress"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
}


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}es" if lower.endswith("s") else f"{lower}s"


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message; enough for what Helm sends as protobuf: its release records."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            length = number()
            yield tag >> 3, data[at : at + length]
            at += length


def _record(data: bytes) -> Object:
    """Return the Secret in a protobuf message: name, namespace, labels, type; its data remain base64."""
    raw = dict(_fields(data[4:]))[2]
    item: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"labels": {}}, "data": {}}
    for field, value in _fields(raw):
        if field == 1:
            for inner, content in _fields(value):
                if inner in (1, 3):
                    item["metadata"]["name" if inner == 1 else "namespace"] = content.decode()
                elif inner == 11:
                    pair = dict(_fields(content))
                    item["metadata"]["labels"][pair[1].decode()] = pair.get(2, b"").decode()
        elif field == 2:
            pair = dict(_fields(value))
            item["data"][pair[1].decode()] = base64.b64encode(pair.get(2, b"")).decode()
        elif field == 3:
            item["type"] = value.decode()
    return item


def _merge(old: Any, patch: Any) -> Any:
    """Merge a patch as Kubernetes' strategic merge does, as far as Helm's patches of these charts need it: lists of
    named items are merged by name.
    """
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(old)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        before = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and isinstance(before, list) and _are_named(value) and _are_named(before):
            changes = {item["name"]: item for item in value}
            kept = [_merge(item, changes.pop(item["name"], {})) for item in before]
            gone = {item["name"] for item in value if item.get("$patch") == "delete"}
            merged[key] = [item for item in [*kept, *changes.values()] if item["name"] not in gone]
        else:
            merged[key] = _merge(before, value)
    return merged


def _are_named(items: list[Any]) -> bool:
    return all(isinstance(item, dict) and "name" in item for item in items)


class LookAlike(http.server.ThreadingHTTPServer):
    """`with LookAlike() as api:` serves at `api.url`; `api.objects` are those of now by (kind, name)."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.lock = threading.Lock()
        self.version = 100
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "LookAlike":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def store(self, item: Object) -> Object:
        """Check an object against its schema, keep it, and return it. Raise jsonschema's error if it is malformed."""
        is_record = item["kind"] == "Secret" and item.get("type", "").startswith("helm.sh")
        if not is_record:
            plain = {key: value for key, value in item.items() if key != "status"}
            kubernetes_validate.validate(plain, kubernetes_validate.latest_version(), strict=True)
        self.version += 1
        item["metadata"] |= {"resourceVersion": str(self.version), "uid": f"uid-{item['metadata']['name']}"}
        if item["kind"] == "Pod":
            item["status"] = {"phase": "Succeeded"}
        self.objects[item["kind"], item["metadata"]["name"]] = item
        return item


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LookAlike
    protocol_version = "HTTP/1.1"
    plurals: ClassVar[dict[str, str]] = {_plural(kind): kind for kinds in _KINDS.values() for kind in kinds}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, body: Object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, reason: str, message: str = "") -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
        self._answer({**body, "message": message or reason}, status)

    def _discover(self, path: str) -> bool:
        groups = [name for name in _KINDS if "/" in name]
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in groups]
        answers: dict[str, Object] = {
            "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {"name": name.partition("/")[0], "versions": [version], "preferredVersion": version}
                    for name, version in zip(groups, versions, strict=True)
                ],
            },
        }
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        for name, kinds in _KINDS.items():
            resources = [
                {"name": _plural(kind), "namespaced": kind != "Namespace", "kind": kind, "verbs": verbs}
                for kind in kinds
            ]
            answers[f"/apis/{name}" if "/" in name else f"/api/{name}"] = {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": name,
                "resources": resources,
            }
        if path in answers:
            self._answer(answers[path])
        elif path == "/openapi/v2":  # an empty document: Helm then leaves checking to the server, which does it
            self.send_response(200)
            self.send_header("Content-Type", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()
        return path in answers or path == "/openapi/v2"

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._discover(url.path):
            return
        parts = url.path.strip("/").split("/")
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        kind = self.plurals.get(rest[0]) if rest else None
        if kind is None:
            return self._fail(404, "NotFound", url.path)
        with self.server.lock:
            self._serve(kind, rest[1] if len(rest) > 1 else "", query, body)

    def _serve(self, kind: str, name: str, query: dict[str, str], body: bytes) -> None:
        found = self.server.objects.get((kind, name))
        if self.command == "GET" and not name:
            return self._list(kind, query)
        if self.command != "POST" and found is None:
            return self._fail(404, "NotFound", f'{kind} "{name}" not found')
        if self.command == "GET":
            return self._answer(found or {})
        if self.command == "DELETE":
            return self._answer(self.server.objects.pop((kind, name)))
        given = _record(body) if body[:4] == b"k8s\0" else json.loads(body)
        if self.command == "POST" and (kind, given["metadata"]["name"]) in self.server.objects:
            return self._fail(409, "AlreadyExists", f'{kind} "{given["metadata"]["name"]}" already exists')
        try:
            merged = _merge(found, given) if self.command == "PATCH" else given
            problem = _forbidden(found, merged) if found else ""
            if problem:
                return self._fail(422, "Invalid", problem)
            self._answer(self.server.store(merged))
        except kubernetes_validate.ValidationError as error:
            self._fail(422, "Invalid", str(error)[:400])

    def _list(self, kind: str, query: dict[str, str]) -> None:
        items = [item for (its_kind, _), item in self.server.objects.items() if its_kind == kind]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            key, _, value = term.partition("=")
            items = [item for item in items if item["metadata"].get("labels", {}).get(key) == value.lstrip("=")]
        for term in filter(None, query.get("fieldSelector", "").split(",")):
            key, _, value = term.partition("=")
            items = [item for item in items if key != "metadata.name" or item["metadata"]["name"] == value]
        if query.get("watch") not in ("true", "1"):
            version = {"resourceVersion": str(self.server.version)}
            return self._answer({"kind": f"{kind}List", "apiVersion": "v1", "metadata": version, "items": items})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        for item in items:
            self.wfile.write(json.dumps({"type": "ADDED", "object": item}).encode() + b"\n")
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle


def _forbidden(old: Object, new: Object) -> str:
    """Return an error message if an update breaks the rule of the real server that charts break most easily.

    Otherwise "".
    """
    if old["kind"] != "StatefulSet":
        return ""
    for name in ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"):
        if old["spec"].get(name) != new["spec"].get(name):
            return f"spec.{name}: Forbidden: updates to statefulset spec for other fields are forbidden"
    return ""
