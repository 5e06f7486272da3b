"""What pyproject.toml cannot say: the description is README.md without links to files, which lead nowhere on an index.

The wheel's tag names x86-64 Linux, whose system calls and processors the package knows; glibc is that of jaxlib.
"""

import pathlib
import re

from setuptools import setup

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)[^)]+\)")
README = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=LINK.sub(r"\1", README),
    long_description_content_type="text/markdown",
    options={"bdist_wheel": {"plat_name": "manylinux_2_27_x86_64"}},
)
