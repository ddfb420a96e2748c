"""certificate.html: a page of a certificate, which works offline and without scripts."""

from pathlib import Path

from gptlite.errors import printable
from gptlite.files import write_whole
from gptlite.satellites.certify.certificate import PAGE, Certificate

WORDS = {True: "ok", False: "failed", None: "not checked"}
CLASSES = {True: "ok", False: "bad", None: "none"}


def write_page(certificate: Certificate, folder: Path) -> Path:
    """Write the page in a folder, and return its path."""
    write_whole(folder / PAGE, page(certificate))
    return folder / PAGE


def page(certificate: Certificate) -> str:
    """Return the page. Names and messages may contain any text and are escaped."""
    from jinja2 import Environment, PackageLoader

    def visible(value: object) -> object:
        return printable(value, "\n") if isinstance(value, str) and not hasattr(value, "__html__") else value

    pages = Environment(
        loader=PackageLoader("gptlite.satellites.certify", ""), autoescape=True, trim_blocks=True, finalize=visible
    )
    return pages.get_template("page.html").render(c=certificate, words=WORDS, classes=CLASSES)
