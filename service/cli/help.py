"""Holds the texts of `--help` that stand below the options: examples, and what an exit status means."""

ENVIRONMENT = "Each option can also be set by the variable in its brackets; an argument wins."
TAGLINE = "Captions images, over HTTP or from the command line, with models that are compiled before they start."
# By name: those that most servers need. `serve --help-all` has all of them.
SERVE_SHOWN = (
    "model",
    "device",
    "backend",
    "buckets",
    "host",
    "port",
    "api_key_file",
    "store",
    "trusted_key",
    "log_format",
)
TOP = """\
examples:
  snapcap serve                                  the demo model on port 8000
  snapcap serve --model ./my-vit-gpt2 --port 80  a folder of VisionEncoderDecoderModel
  snapcap caption photo.jpg                      without a server
  snapcap build --store s3://bucket/snapcap      compile once, start warm everywhere
  snapcap import org/old-captioner ./captioner   convert older files, then serve the folder

`snapcap COMMAND --help` lists the options of a command.
"""
SERVE = f"""\
`snapcap serve --help-all` lists all options, with the limits of requests, memory and time.

examples:
  snapcap serve
  snapcap serve --model s3://bucket/captioner --device cuda:0 --log-format json
  SNAPCAP_PORT=9000 snapcap serve
  curl --data-binary @photo.jpg localhost:8000/v1/caption

{ENVIRONMENT}
"""
BUILD = f"""\
examples:
  snapcap build                                             into the folder that `snapcap serve` looks in
  snapcap build --store s3://bucket/snapcap --sign-key KEY  once for a fleet of equal machines
  snapcap build --backend jit                               cache artifacts for `snapcap serve --backend jit`

A second build of the same key does nothing, and an interrupted one goes on where it was. Exit
status 0: the store has the artifacts; 1: it has not; 130: interrupted (143 by SIGTERM).
{ENVIRONMENT}
"""
EXPLAIN = f"""\
examples:
  snapcap explain
  snapcap explain --all                          with every factor of the key
  snapcap explain --store s3://bucket/snapcap --trusted-key KEY.pub

Exit status 0: there are artifacts; 1: there are none, and the factors that differ from the nearest are listed.
{ENVIRONMENT}
"""
KEYGEN = """\
examples:
  snapcap keygen artifacts.key
  snapcap build --store s3://bucket/snapcap --sign-key artifacts.key
  snapcap serve --store s3://bucket/snapcap --trusted-key artifacts.key.pub
"""
CAPTION = f"""\
examples:
  snapcap caption photo.jpg
  snapcap caption --prompt "a red" *.png
  snapcap caption photos --recursive --output captions.jsonl
  snapcap caption photos --sidecar --resume      photo.txt beside each photo.jpg that has none
  find . -name '*.jpg' -newer last | snapcap caption -

No file is replaced without --overwrite. An image that cannot be read does not stop the others and
is listed at the end. Exit status 0: every image has its caption; 1: some have none; 2: the command
line is wrong, or captions are in the way; 130: interrupted (143 by SIGTERM), and --resume goes on.
{ENVIRONMENT}
"""
IMPORT = f"""\
examples:
  snapcap import nlpconnect/vit-gpt2-image-captioning ./captioner
  snapcap serve --model ./captioner

{ENVIRONMENT}
"""

NO_TORCH_MODULE = (
    "torch's libraries are installed here without its Python module, which compiles: build where all of torch is, "
    "as in the image of the target builder"
)
