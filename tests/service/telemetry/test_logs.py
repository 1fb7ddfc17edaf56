import json
import logging
import math
import subprocess
import sys
import time
import warnings

import pytest
from starlette.testclient import TestClient
from support.attacks.attack_pictures import segment, with_segments
from support.parity.pictures import encoded, scene

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.telemetry import logs


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines, those that wait included."""
    logging.getLogger("snapcap").handlers[0].flush()
    return capsys.readouterr().err.splitlines()


def test_a_request_is_one_line_of_json(
    client: TestClient, image, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure("json", "info")
    client.post("/v1/caption?prompt=a%0Ab", content=image(), headers={"X-Request-Id": "id-1"})
    client.get("/livez")
    client.get("/no%0Awhere")
    lines = [json.loads(line) for line in written(capsys)]
    assert [line["path"] for line in lines] == ["/v1/caption", "/no%0Awhere"]
    first = lines[0]
    assert (first["level"], first["logger"], first["message"]) == ("info", "snapcap.access", "request")
    assert (first["method"], first["status"], first["request_id"]) == ("POST", 200, "id-1")
    assert first["ms"] >= 0
    assert first["time"].endswith("Z")


def test_a_warning_of_pillow_about_a_picture_is_no_line_and_no_error() -> None:
    """Whatever PYTHONWARNINGS says."""
    block = b"Exif\0\0II*\0\x08\0\0\0\1\0\x0f\1\2\0\xff\0\0\0\xff\xff\0\0"
    picture = with_segments(encoded(scene(8, 8), "JPEG"), segment(0xE1, block))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"EXIF|larger than file"):
            ImageTransform((8, 8)).decode(picture)
        logs.configure("text", "info")
        assert ImageTransform((8, 8)).decode(picture).pixels.shape == (8, 8, 3)


def test_probes_are_logged_at_debug_level(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "debug")
    client.get("/livez", headers={"X-Request-Id": "id-2"})
    (line,) = written(capsys)
    assert "debug   request method=GET path=/livez status=200 ms=" in line
    assert line.endswith(" client=testclient request_id=id-2")


def test_exceptions_stay_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("snapcap.engine").exception("step failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: boom" in json.loads(line)["exception"]


def test_a_text_line_has_fields_and_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "warning")
    logger = logging.getLogger("snapcap.start")
    logger.info("hidden")
    logger.warning("phase", extra={"fields": {"name": "load_weights", "seconds": 0.12345}})
    try:
        raise ValueError("boom")
    except ValueError:
        logger.error("failed", exc_info=sys.exc_info())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("warning phase name=load_weights seconds=0.123")
    assert lines[-1] == "ValueError: boom"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain/path?a-b_c:d,é", "plain/path?a-b_c:d,é"),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "no"', r'"say \"no\""'),
        ("C:\\x", r'"C:\\x"'),
        ("a\nb\r\tc", r'"a\nb\r\tc"'),
        ("\x1b[31mred\x7f\x85\u2028", r'"\u001b[31mred\u007f\u0085\u2028"'),
        ("\u202etxt\u2066\u061c\u200f\u200b\ufeff", r'"\u202etxt\u2066\u061c\u200f\u200b\ufeff"'),
        ("\ud800", r'"\ud800"'),
        ("", '""'),
        (True, "true"),
        (1.0 / 3, "0.333"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_a_text_line_is_logfmt(value: object, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")
    logging.getLogger("snapcap.start").info("phase", extra={"fields": {"before": 1, "value": value, "after": 2}})
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.endswith(f" phase before=1 value={text} after=2")
    if text.startswith('"'):  # and is read back as it was
        assert json.loads(text) == value


def test_numbers_of_json_are_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    fields = {"s": 0.1 + 0.2, "whole": 3, "long": 12345.67891, "endless": math.inf, "text": "1.23456"}
    logging.getLogger("snapcap.start").info("phase", extra={"fields": fields})
    line = capsys.readouterr().err
    assert '"s": 0.3, "whole": 3, "long": 12345.679, "endless": "inf", "text": "1.23456"' in line
    json.loads(line, parse_constant=pytest.fail)


def test_broken_multipart_bodies_do_not_flood_the_log(
    client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("text", "info")
    client.post("/v1/caption", content=b"garbage", headers={"Content-Type": "multipart/form-data; boundary=B"})
    (line,) = written(capsys)
    assert "status=400" in line


def test_lines_of_requests_are_written_soon_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")
    access = logging.getLogger(logs.ACCESS)
    access.info("first")
    access.info("second")
    logging.getLogger("snapcap.engine").error("third")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["first", "second", "third"]
    access.info("fourth")
    end, lines = time.monotonic() + 30, ""
    while not lines:
        assert time.monotonic() < end
        time.sleep(0.01)
        lines = capsys.readouterr().err
    assert lines.split()[-1] == "fourth"


def test_lines_that_nobody_takes_are_counted_and_not_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 2)
    monkeypatch.setattr(logs, "DELAY_S", 30.0)
    logs.configure("text", "info")
    for number in range(5):
        logging.getLogger(logs.ACCESS).info("line %d", number)
    logging.getLogger("snapcap.engine").error("at once")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2:4] for line in lines[:2]] == [["line", "0"], ["line", "1"]]
    assert lines[2].endswith("at once")
    assert "lines of requests were left out lines=3" in lines[3]


def test_the_end_of_the_process_loses_no_line() -> None:
    program = (
        "import logging; from snapcap.service.telemetry import logs; from snapcap.service.server import serve\n"
        "logs.configure('text', 'info');"
        "logging.getLogger(logs.ACCESS).info('last'); serve.leave(3)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.split()[-1]) == (3, "last")


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_librarys_message_cannot_make_a_line_or_steer_a_terminal(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(style, "info")
    sent = "\x9b2J status=200\nforged\x85\u202e"
    logging.getLogger("opentelemetry.sdk").warning("cannot read %s", sent)
    (line,) = written(capsys)
    assert line.isprintable()
    assert "forged" in line


def test_headers_about_traces_write_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "opentelemetry.sdk", reason="OPENTELEMETRY'S SDK IS NOT INSTALLED: ITS WARNINGS ARE NOT TESTED"
    )
    from opentelemetry import propagate

    logs.configure("text", "info")
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for hostile in ("\x9b2J x status=200", "x" * 20_000, "a=b,," * 2_000):
        propagate.extract({"traceparent": traceparent, "tracestate": hostile, "baggage": hostile})
    assert written(capsys) == []
