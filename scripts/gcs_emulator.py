"""The emulator gcp-storage-emulator with what it lacks of Cloud Storage's XML interface, by which obstore speaks.

Listings, deletions and HEAD, ETags and generations; and, also of the JSON interface, by which gcsfs and tensorstore
(and so Orbax) speak, generations of what is read, and writing on condition of one.
"""

import contextlib
import email.utils
import functools
import html
import http.server
import logging
import os
import threading
from collections.abc import Iterator
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

OBJECT = r"^/(?!storage/|upload/|download/|batch|b/|wipe)(?P<bucket_name>[-.\w]+)/(?P<object_id>.*[^/]+)$"
LOCK = threading.Lock()
BUCKET = r"^/(?!wipe|batch)(?P<bucket_name>[-.\w]+)$"


DOWNLOAD, INSERT = objects.download, objects.insert


def _get(request, response, storage, *_: object) -> None:
    DOWNLOAD(request, response, storage)
    if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        _describe(request, response, storage)


def _may_write(request, response, storage, name: str, wanted: str | None) -> bool:
    """Whether the object is of the generation `wanted`, 0 for none; else this is answered."""
    try:
        there = storage.get_file_obj(request.params["bucket_name"], name)["generation"]
    except NotFound:
        there = "0"
    if wanted in (None, there):
        return True
    _ = request.data  # read, so that the connection goes on
    response.status = HTTPStatus.PRECONDITION_FAILED
    return False


def _insert(request, response, storage, *_: object) -> None:
    name, wanted = (request.query.get(key, [None])[0] for key in ("name", "ifGenerationMatch"))
    if name is None or _may_write(request, response, storage, name, wanted):
        INSERT(request, response, storage)


def _put(request, response, storage) -> None:
    wanted = request.get_header("x-goog-if-generation-match")
    if not _may_write(request, response, storage, request.params["object_id"], wanted):
        return
    if request.data is None:
        request._data = b""
    objects.xml_upload(request, response, storage)
    if response.status == HTTPStatus.OK:
        _describe(request, response, storage)


def _delete(request, response, storage) -> None:
    objects.delete(request, response, storage)
    if response.status == HTTPStatus.OK:
        response.status = HTTPStatus.NO_CONTENT


def _describe(request, response, storage) -> None:
    found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
    response["ETag"], response["x-goog-generation"] = f'"{found["generation"]}"', found["generation"]
    response["Last-Modified"] = email.utils.formatdate(usegmt=True)


def _list(request, response, storage) -> None:
    prefix = request.query.get("prefix", [""])[0]
    try:
        files, _ = storage.get_file_list(request.params["bucket_name"], prefix, None, None)
    except NotFound:
        response.status = HTTPStatus.NOT_FOUND
        return
    entries = "".join(
        f"<Contents><Key>{html.escape(file['name'])}</Key><LastModified>{file['updated']}</LastModified>"
        f'<ETag>"{file["generation"]}"</ETag><Size>{file["size"]}</Size></Contents>'
        for file in files
    )
    response["Content-type"] = "application/xml"
    response._content = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


class _Router(server.Router):
    """One request at a time, so that conditions hold until what they allow is done."""

    def handle(self, method: str) -> None:
        with LOCK:
            super().handle(method)


class _Handler(server.RequestHandler):
    def do_HEAD(self) -> None:  # noqa: N802 - http.server calls it so
        body, self.wfile = self.wfile, _Headers(self.wfile)
        server.Router(self).handle(server.GET)
        self.wfile = body


class _Headers:
    """A stream of which only the headers of an answer are written."""

    def __init__(self, stream):
        self._stream, self._ended = stream, False

    def write(self, data: bytes) -> None:
        if not self._ended:
            self._stream.write(data)
        self._ended = self._ended or data.endswith(b"\r\n\r\n")

    def flush(self) -> None:
        self._stream.flush()


class _Server(http.server.ThreadingHTTPServer):
    """With threads: a client that connects and says nothing doesn't keep the others waiting."""

    def handle_error(self, *_: object) -> None:
        """Clients that have read enough hang up."""


class _Thread(server.APIThread):
    def run(self) -> None:
        self._httpd = _Server((self._host, self._port), functools.partial(_Handler, self._storage))
        self.is_running.set()
        self._httpd.serve_forever()


NEW = {DOWNLOAD: _get, INSERT: _insert}


@contextlib.contextmanager
def gcs(bucket: str) -> Iterator[str]:
    """The address of an empty bucket, which the environment names to this process and those that it starts."""
    objects.download = _get
    known = [(route, {verb: NEW.get(act, act) for verb, act in acts.items()}) for route, acts in server.HANDLERS]
    server.HANDLERS = (
        (BUCKET, {server.GET: _list}),
        (OBJECT, {server.GET: _get, server.PUT: _put, server.DELETE: _delete}),
        *known,
    )
    server.APIThread, server.Router = _Thread, _Router
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it logs what is asked for and missing
    emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket)
    with emulator:
        url = "http://{}:{}".format(*emulator._api._httpd.server_address)
        # Unless it is told not to, gcsfs asks for the kind of a bucket by gRPC, which emulators don't speak.
        about = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "FSSPEC_GCS_TOKEN": "anon"}
        os.environ.update(about | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"})
        yield f"gs://{bucket}"
