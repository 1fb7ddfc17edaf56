"""Requests that are odd but whole: each has one answer, which is no error of the server's."""

import pytest
from support.attacks.abuse import Abused
from support.servers.raw_http import connected, exchange, read_all, statuses


def get(target: str, *lines: str, method: str = "GET", host: str = "a") -> bytes:
    fields = [f"Host: {host}", "Connection: close", *lines]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *fields, "", ""]).encode("utf-8", "surrogateescape")


def post(*lines: str, host: str = "127.0.0.1") -> bytes:
    """The head of a request whose body has yet to come."""
    return get("/v1/caption", *lines, "Content-Length: 100000", method="POST", host=host)


QUERY = "&".join(f"option{number}=1" for number in range(2_000))
ODD = {
    "absolute_target": get("http://elsewhere.example/livez"),
    "absolute_caption": get("http://elsewhere.example/v1/caption", method="POST"),
    "authority_target": get("elsewhere.example:443", method="CONNECT"),
    "asterisk": get("*", method="OPTIONS"),
    "trace": get("/livez", "Cookie: secret", method="TRACE"),
    "unknown_method": get("/v1/caption", method="PROPFIND"),
    "method_of_webdav": get("/v1/caption", method="MKCALENDAR"),
    "head_of_probe": get("/livez", method="HEAD"),
    "head_of_caption": get("/v1/caption", method="HEAD"),
    "options_of_caption": get("/v1/caption", "Origin: http://elsewhere.example", method="OPTIONS"),
    "delete": get("/v1/caption", method="DELETE"),
    "host_weird": get("/livez", host="a@b:c[d]<script>"),
    "host_empty": get("/livez", host=""),
    "host_twice": get("/livez", "Host: b"),
    "host_long": get("/livez", host="a" * 8_000),
    "host_missing": b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
    "http_1_0": b"GET /livez HTTP/1.0\r\n\r\n",
    "path_encoded": get("/%6civez"),
    "path_dots": get("/../../../../etc/passwd"),
    "path_dots_encoded": get("/samples/..%2f..%2f..%2fetc%2fpasswd"),
    "path_dots_twice_encoded": get("/samples/%252e%252e/%252e%252e/etc/passwd"),
    "path_backslashes": get("/samples/..\\..\\etc\\passwd"),
    "path_null": get("/v1/caption%00.png"),
    "path_bad_percent": get("/v1/caption%zz%"),
    "path_bad_utf_8": get("/v1/%ff%fe%c0%80/caption"),
    "path_raw_bytes": get("/v1/\udcff\udcfe"),
    "path_slashes": get("/" * 4_000 + "v1/caption"),
    "path_long": get("/" + "a" * 30_000),
    "path_crlf": get("/livez%0d%0aSet-Cookie:%20a=b"),
    "model_of_v2": get("/v2/models/" + "%2e%2e%2f" * 500 + "/infer", method="POST"),
    "query_many": get(f"/v1/caption?{QUERY}", method="POST"),
    "query_ampersands": get("/v1/caption?" + "&" * 30_000, method="POST"),
    "query_bad_utf_8": get("/v1/caption?prompt=%ff%fe%c0", method="POST"),
    "query_null": get("/v1/caption?prompt=%00", method="POST"),
    "query_surrogate": get("/v1/caption?prompt=%ed%a0%80", method="POST"),
    "query_twice": get("/v1/caption?seed=1&seed=2", method="POST"),
    "request_id_long": get("/livez", "X-Request-Id: " + "a" * 10_000),
    "request_id_bytes": get("/livez", "X-Request-Id: \udc80\udcff"),
    "request_id_markup": get("/livez", "X-Request-Id: <script>alert(1)</script>"),
    "traceparent_long": get("/livez", "traceparent: cc-" + "0a" * 16 + "-" + "0b" * 8 + "-01-" + "x" * 20_000),
    "traceparent_bytes": get("/livez", "traceparent: 00-\udc80\udcff-01"),
    "traceparents_many": get("/livez", *[f"traceparent: 00-{n:032x}-{n:016x}-01" for n in range(1, 90)]),
    "preflight_of_a_thousand_headers": get(
        "/v1/caption",
        "Origin: http://elsewhere.example",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: " + ",".join(f"x-{n}" for n in range(3_000)),
        method="OPTIONS",
    ),
    "authorization_bytes": get("/v1/caption", "Authorization: Bearer \udc80", method="POST"),
    "accept_long": get("/", "Accept: " + "text/html;q=0.1," * 2_000),
    "accept_of_numbers": get("/", "Accept: text/html;q=1e400, */*;q=nan"),
    "range_many": get("/", "Range: bytes=" + ",".join(f"{n}-" for n in range(1_000))),
    "etag_many": get("/", "If-None-Match: " + ", ".join(f'"{n}"' for n in range(2_000))),
    "websocket": get(
        "/v1/caption",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: AAAA",
        "Sec-WebSocket-Version: 13",
    ),
    "h2c": get("/livez", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    "h2c_caption": get("/v1/caption", "Connection: Upgrade", "Upgrade: h2c", "Content-Length: 0", method="POST"),
    "expect_nonsense": get("/v1/caption", "Expect: miracles", method="POST"),
    "expect_100": get("/v1/caption", "Expect: 100-continue", "Content-Length: 0", method="POST"),
    "trace_parent": get("/livez", "Traceparent: 00-" + "z" * 5_000),
    "forwarded": get("/", "X-Forwarded-Prefix: //evil", "X-Forwarded-Host: evil", "Forwarded: for=evil"),
}


@pytest.mark.parametrize("name", ODD)
def test_one_answer(abused: Abused, name: str) -> None:
    received = exchange(abused.port, ODD[name])
    (status,) = [status for status in statuses(received) if status != 100]
    assert 200 <= status < 500, received
    head, _, body = received.rpartition(b"\r\n\r\n")
    assert b"\r\nset-cookie:" not in head.lower()
    assert b"root:" not in body
    assert b"secret" not in body


EVIL = "Origin: http://elsewhere.example"
PAGES = {
    "form": post("Content-Type: multipart/form-data; boundary=b", EVIL),
    "no_type": post(EVIL),
    "text": post("Content-Type: text/plain", EVIL),
    "sandboxed": post("Origin: null"),
    "without_origin": post("Sec-Fetch-Site: cross-site"),
    "next_port": post("Origin: http://127.0.0.1:1", "Sec-Fetch-Site: same-site"),
    "rebound": get("/startup", host="elsewhere.example"),
    "rebound_post": post("Origin: http://elsewhere.example:8000", host="elsewhere.example:8000"),
    "rebound_page": get("/", host="localhost.elsewhere.example"),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_other_origins(abused: Abused, name: str) -> None:
    """Each is refused before its body, of which nothing comes, is read."""
    with connected(abused.port) as client:
        client.sendall(PAGES[name])
        assert statuses(read_all(client)) == [421 if name.startswith("rebound") else 403]


def test_all_of_them(abused: Abused) -> None:
    def attack() -> None:
        for data in [*ODD.values()] * 10:
            exchange(abused.port, data)

    abused.withstands(attack)
