"""Forms as RFC 7578 has them, and those that are made to be expensive or ambiguous."""

import base64
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.errors import InvalidMultipart, ServiceError, UnsupportedMediaType
from snapcap.service.http import multipart
from snapcap.service.http.multipart import Part, boundary_of, parse_multipart

Png = Callable[..., bytes]
FILE = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
FORM = "multipart/form-data; boundary=B"


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    """Parts from their heads on."""
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + end


def field(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"\r\n%b\r\n%b' % (name, more, value)


def post(client: TestClient, body: bytes, content_type: str = FORM) -> Any:
    return client.post("/v1/caption", content=body, headers={"Content-Type": content_type})


def test_parts_are_as_they_were_sent() -> None:
    body = form(field(b"prompt", "é".encode()), FILE + b"\r\n--C\r\n\0", b"\r\n" + FILE[:0], end=b"--B--")
    with pytest.raises(InvalidMultipart, match=r"Content-Disposition"):
        parse_multipart(b"B", body)
    parts = parse_multipart(b"B", form(field(b"prompt", "é".encode()), FILE + b"\r\n--C\r\n\0", FILE, end=b"--B--"))
    assert parts == [
        Part("prompt", None, "é".encode()),
        Part("image", "a.png", b"\r\n--C\r\n\0"),
        Part("image", "a.png", b""),
    ]
    assert parts[0].text == "é"


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 8, 13])
def test_a_form_is_read_alike_wherever_its_pieces_end(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """A boundary may begin in one piece and end, or turn out to be none, in the next."""
    content = b"\r\n--B\r\n--B\r\r\n--\r\n--A--B-\r\n"
    bodies = [
        form(FILE + content[at:], field(b"prompt", b"a"), FILE + content[:at], end=end)
        for at in range(len(content))
        for end in (b"--B--", b"--B--\r\n", b"--B-", b"--Bx")
    ]
    whole = [parts_of(body) for body in bodies]
    assert None in whole
    assert any(whole)
    monkeypatch.setattr(multipart, "_PIECE", piece)
    assert [parts_of(body) for body in bodies] == whole


def parts_of(body: bytes) -> list[Part] | None:
    """Returns the parts of a form; None if it is refused."""
    with contextlib.suppress(InvalidMultipart):
        return parse_multipart(b"B", body)
    return None


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "utf8", '"utf-8"', "us-ascii"])
def test_utf_8_is_read(client: TestClient, image: Png, charset: str) -> None:
    typed = f"Content-Type: text/plain; charset={charset}\r\n".encode()
    body = form(field(b"_charset_", charset.strip('"').encode()), FILE + image(5), field(b"prompt", b"a", typed))
    assert post(client, body, f"{FORM}; charset={charset}").status_code == 200


def test_a_text_in_latin_1() -> None:
    """Apache's HttpClient says so of each text, for which it is not told otherwise."""
    typed = b"Content-Type: text/plain; charset=ISO-8859-1\r\n"
    (part,) = parse_multipart(b"B", form(field(b"prompt", "à é".encode("latin-1"), typed)))
    assert part.text == "à é"


def test_a_form_in_latin_1() -> None:
    """The charset of the form, or of its field `_charset_`, holds for each text that does not name its own."""
    said, typed = "à é".encode("latin-1"), b"Content-Type: text/plain; charset=UTF-8\r\n"
    texts = (field(b"prompt", said), field(b"task", "ü".encode(), typed))
    form_of_field = form(field(b"_charset_", b"ISO-8859-1"), *texts)
    for parts in (
        parse_multipart(b"B", form(*texts), boundary_of(f"{FORM}; charset=ISO-8859-1")[1]),
        parse_multipart(b"B", form_of_field),
    ):
        assert [part.text for part in parts] == ["à é", "ü"]


def test_a_long_text_in_latin_1_is_not_converted() -> None:
    typed = b"Content-Type: text/plain; charset=ISO-8859-1\r\n"
    with pytest.raises(UnsupportedMediaType):
        parse_multipart(b"B", form(field(b"image", b"\xe9" * (64 << 10) + b"\xe9", typed)))
    (part,) = parse_multipart(b"B", form(field(b"image", b"/9j/" * (64 << 10), typed)))  # base64 is ASCII
    assert part.data == b"/9j/" * (64 << 10)


@pytest.mark.parametrize(
    "charset", ["punycode", "undefined", "idna", "unicode_escape", "koi8-r", "utf-7", "x" * 999]
)
def test_no_other_charset_is_looked_up(client: TestClient, image: Png, charset: str) -> None:
    bodies = [
        (form(FILE + image(5), field(b"prompt", b"a" * 400_000)), f"{FORM}; charset={charset}"),
        (form(FILE + image(5), field(b"_charset_", charset.encode())), FORM),
        (
            form(
                FILE + image(5), field(b"prompt", b"a", f"Content-Type: text/plain; charset={charset}\r\n".encode())
            ),
            FORM,
        ),
    ]
    for body, content_type in bodies:
        reply = post(client, body, content_type)
        assert (reply.status_code, reply.json()["code"]) == (415, "unsupported_media_type"), reply.text
        assert "UTF-8" in reply.json()["detail"]


def test_what_is_not_utf_8(client: TestClient, image: Png) -> None:
    for bad in (field(b"prompt", b"\xff"), field(b"\xff", b"a"), FILE.replace(b"image", b"\xff") + b"a"):
        reply = post(client, form(FILE + image(5), bad))
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_multipart")
    named = client.post(
        "/v1/captions",
        content=form(FILE.replace(b"a.png", b"\xe9.png") + image(5)),
        headers={"Content-Type": FORM},
    )
    assert named.json()["captions"][0]["filename"] == "\N{REPLACEMENT CHARACTER}.png"


@pytest.mark.parametrize("cut", [1, 3, 6, 8, 9, 40, 200])
def test_a_form_without_its_end_is_refused(client: TestClient, image: Png, cut: int) -> None:
    body = form(FILE + image(5), field(b"max_new_tokens", b"16"), end=b"--B--")
    assert post(client, body).status_code == 200
    reply = post(client, body[:-cut])
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_multipart")


@pytest.mark.parametrize(
    ("content_type", "error"),
    [
        ("multipart/form-data", InvalidMultipart),
        ("multipart/form-data; boundary=", InvalidMultipart),
        ("multipart/form-data; boundary=" + "B" * 71, InvalidMultipart),
        ("multipart/form-data; boundary=B; charset=cp037", UnsupportedMediaType),
    ],
)
def test_types_that_cannot_be_read(content_type: str, error: type[ServiceError]) -> None:
    with pytest.raises(error):
        boundary_of(content_type)
    assert boundary_of('multipart/form-data; boundary="a b"') == (b"a b", b"")


NAMES = {
    b'filename="a;b;c.png"': "a;b;c.png",
    b'filename="%b.png"' % (b";" * 40): ";" * 40 + ".png",
    rb'filename="a\"b\\c;d.png"': 'a"b\\c;d.png',
    b"filename=a.png": "a.png",
    b"FileName = a.png ; x": "a.png",
    b'filename=""': "",
    b'filename="C:\\photos\\a.png"': "a.png",
    b'filename="a': '"a',
    b"filename*=UTF-8''%e2%82%ac%3B.png": "\u20ac;.png",
    b"filename*=\"utf-8'en'a%20b.png\"": "a b.png",
    b"filename*=a.png": "a.png",
    b"filename*0*=UTF-8''%c3%a9; filename*1=.png": "\u00e9.png",
    b"filename*=UTF-8''other.png; filename=\"a.png\"": "a.png",
    b"filename*=UTF-8''%ff": "\N{REPLACEMENT CHARACTER}",
}


@pytest.mark.parametrize("parameter", NAMES)
def test_names_of_files(parameter: bytes) -> None:
    head = b'Content-Disposition: form-data; name="image"; ' + parameter + b"\r\n\r\n"
    assert parse_multipart(b"B", form(head + b"x")) == [Part("image", NAMES[parameter], b"x")]


def test_an_input_without_a_file_and_an_option_without_a_value_are_not_given(
    client: TestClient, image: Png, engine
) -> None:
    """As a browser sends a form of which some fields are left empty."""
    typed = b"Content-Type: application/octet-stream\r\n\r\n"
    empty = b'Content-Disposition: form-data; name="%b"; filename=""\r\n' + typed
    left = [empty % b"image", empty % b"other", field(b"seed", b""), field(b"prompt", b""), field(b"top_k", b"")]
    reply = post(client, form(*left, FILE + image(5), field(b"top_k", b"3")))
    assert reply.json()["caption"] == "5 7"
    assert (engine.requests[-1].params.top_k, engine.requests[-1].params.seed) == (3, None)
    assert post(client, form(*left)).json()["code"] == "missing_image"
    assert post(client, form(FILE)).json()["reason"] == "empty"  # a file was chosen, which is empty
    assert client.post("/v1/caption?top_k=&seed=", content=image(5)).json()["caption"] == "5 7"
    assert post(client, form(FILE + image(5), field(b"sede", b""))).json()["code"] == "unknown_option"


@pytest.mark.parametrize("name", [b"image", b"images", b"image[]", b"images[]", b"images[0]"])
def test_names_that_libraries_give_the_elements_of_a_list(client: TestClient, image: Png, name: bytes) -> None:
    reply = post(client, form(FILE.replace(b'"image"', b'"%b"' % name) + image(5)))
    assert reply.json().get("caption") == "5 7", reply.text
    assert post(client, form(FILE.replace(b'"image"', b'"%b["' % name) + image(5))).status_code == 422


@pytest.mark.parametrize("encoding", [b"binary", b"8bit", b"Base64 "])
def test_a_part_in_an_encoding_of_mails(client: TestClient, image: Png, encoding: bytes) -> None:
    line = b"Content-Transfer-Encoding: " + encoding + b"\r\n"
    data = base64.encodebytes(image(5)) if b"64" in encoding else image(5)
    reply = post(client, form(FILE.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n") + data))
    assert reply.json().get("caption") == "5 7", reply.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (form(FILE + b"x").replace(b"B", b"C"), "the boundary that the Content-Type names is not in it"),
        (form(FILE + b"x").replace(b"\r\n", b"\n"), "a line ends with LF alone"),
        (form(b"Content-Transfer-Encoding: base64\r\n" + FILE + b"#"), "cannot be decoded .*'base64'"),
        (form(b"Content-Transfer-Encoding: quoted-printable\r\n" + FILE + b"#"), "cannot be .*'quoted-printable'"),
    ],
)
def test_what_is_wrong_with_a_form_is_named(body: bytes, said: str) -> None:
    with pytest.raises(InvalidMultipart, match=said):
        parse_multipart(b"B", body)
    assert parse_multipart(b"B", b"a text for old programs\r\n" + form(FILE + b"x"))[0].data == b"x"


def test_an_image_without_a_file_name(client: TestClient, image: Png) -> None:
    """As clients send bytes that they have in memory, and as pages send what they have drawn."""
    small, large = (b"data:image/png;base64," + base64.b64encode(image(5) + bytes(more)) for more in (0, 100_000))
    for value, more in ((image(5), b"Content-Type: image/png\r\n"), (image(5), b""), (small, b""), (large, b"")):
        reply = post(client, form(field(b"image", value, more), field(b"image", b"")))
        assert reply.json().get("caption") == "5 7", reply.text
    assert "no file name" in post(client, form(field(b"image", b"photo.jpg"))).json()["detail"]


MIB = 1 << 20
EXPENSIVE = {
    "parts": form(*[field(b"a", b"")] * 50_000),
    "boundary_within": form(FILE + b"\r\n--Bx" * (4 * MIB)),
    "near_boundary": form(FILE + b"\r\n--A" * (4 * MIB)),
    "padding": b"--B" + b" " * (20 * MIB) + b"\r\n" + FILE,
    "padding_later": form(FILE + b"x")[:-6] + b" \t" * (10 * MIB),
    "preamble": b"\r\n" * (10 * MIB),
    "preamble_hyphens": b"\r\n" + b"-" * (20 * MIB),
    "header_name": b"--B\r\n" + b"a" * (20 * MIB),
    "header_value": b"--B\r\na: " + b"b" * (20 * MIB),
    "header_spaces": b"--B\r\na:" + b" " * (20 * MIB),
    "headers": b"--B\r\n" + b"a:b\r\n" * (4 * MIB),
    "disposition": form(b"Content-Disposition: form-data; name=a" + b";" * 4000 + b"\r\n\r\n"),
    "quotes": form(b"Content-Disposition: form-data; name=a" + b'; a="' * 1000 + b"\r\n\r\n"),
    "escapes_in_quotes": form(b'Content-Disposition: form-data; name="' + b"\\\\" * 2000 + b"\r\n\r\n"),
    "spaces_before_parameters": form(b"Content-Disposition: form-data; name=a;" + b" " * 4000 + b"\r\n\r\n"),
    "epilogue": form(FILE) + b"--B" * 30 + b"\0" * (20 * MIB),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_no_form_takes_longer_than_its_bytes_allow(name: str) -> None:
    """In a time of this machine's own: what looking through as many bytes a few times takes."""
    body = EXPENSIVE[name]
    began = time.thread_time()
    for byte in range(20):
        body.count(b"\r\n%c" % byte)
    allowed = 10 * (time.thread_time() - began) + 0.2
    began = time.thread_time()
    with contextlib.suppress(InvalidMultipart):
        parse_multipart(b"B", body)
    assert time.thread_time() - began < allowed


@pytest.mark.parametrize("line", [b"Content-Disposition: form-data; name=a", b"Content-Type: text/plain"])
def test_a_field_has_few_parameters(line: bytes) -> None:
    """Small forms are read on the event loop, in a time that grows with the square of their parameters."""
    other = b"" if line.startswith(b"Content-D") else b"Content-Disposition: form-data; name=a\r\n"
    few, many = (form(other + line + b"; b=c" * count + b"\r\n\r\n") for count in (10, 17))
    assert parse_multipart(b"B", few)[0].name == "a"
    with pytest.raises(InvalidMultipart, match="more than 16 parameters"):
        parse_multipart(b"B", many)


def test_a_content_type_is_not_read_without_end() -> None:
    began = time.thread_time()
    with pytest.raises(InvalidMultipart):
        boundary_of('multipart/form-data; a="' + ";" * 32_000)
    assert time.thread_time() - began < 0.5
