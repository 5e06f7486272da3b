"""What pyproject.toml cannot say: the description is README.md without links to files, which lead nowhere on an index."""

import pathlib
import re

from setuptools import setup

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)")
README = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=LINK.sub(r"\1", README),
    long_description_content_type="text/markdown",
)
