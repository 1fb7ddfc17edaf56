"""Holds the texts of `--help` below the options: examples, and the meaning of exit statuses."""

ENVIRONMENT = "Each option can also be set by the variable in its brackets; the command line overrides it."
TAGLINE = "Captions images, over HTTP or from the command line, with models that are compiled before they start."
# Names of the options that most servers need. `serve --help-all` shows all options.
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
`snapcap serve --help-all` lists all options, including the limits of requests, memory and time.

examples:
  snapcap serve
  snapcap serve --model s3://bucket/captioner --device cuda:0 --log-format json
  SNAPCAP_PORT=9000 snapcap serve
  curl --data-binary @photo.jpg localhost:8000/v1/caption

{ENVIRONMENT}
"""
BUILD = f"""\
examples:
  snapcap build                                             into the default folder of `snapcap serve`
  snapcap build --store s3://bucket/snapcap --sign-key KEY  once for a fleet of equal machines
  snapcap build --backend jit                               cache artifacts for `snapcap serve --backend jit`

A second build of the same key does nothing. A build after an interrupted one reuses its packages.
Exit status 0: the store has the artifacts; 1: the build failed; 130: interrupted (143 by SIGTERM).
{ENVIRONMENT}
"""
EXPLAIN = f"""\
examples:
  snapcap explain
  snapcap explain --all                          with every factor of the key
  snapcap explain --store s3://bucket/snapcap --trusted-key KEY.pub

Exit status 0: the store has the artifacts; 1: it does not, and the factors that differ from the nearest artifacts
are listed.
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
  snapcap caption photos --sidecar --resume      write photo.txt beside each photo.jpg that has none
  find . -name '*.jpg' -newer last | snapcap caption -

No file is replaced without --overwrite. An image that cannot be read is listed at the end; the
others are captioned. Exit status 0: every image has a caption; 1: some images have none; 2: the
command line is wrong, or the output exists already; 130: interrupted (143 by SIGTERM). After an
interruption, --resume captions the remaining images.
{ENVIRONMENT}
"""
IMPORT = f"""\
examples:
  snapcap import nlpconnect/vit-gpt2-image-captioning ./captioner
  snapcap serve --model ./captioner

{ENVIRONMENT}
"""

NO_TORCH_MODULE = (
    "torch's libraries are installed here without its Python module, which a build needs: build where torch is "
    "installed completely, as in the image of the Dockerfile's target builder"
)
