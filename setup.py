"""Package list: everything under `graphcomp/`, and `passes/` as `graphcomp.passes`.

It cannot be written in pyproject.toml, where packages are either all found or all listed by hand.
"""

from setuptools import find_packages, setup

passes = ["graphcomp.passes", *(f"graphcomp.passes.{name}" for name in find_packages("passes"))]

setup(
    packages=[*find_packages(include=["graphcomp", "graphcomp.*"]), *passes],
    package_dir={"": ".", "graphcomp.passes": "passes"},
)
