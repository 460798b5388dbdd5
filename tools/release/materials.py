"""The bill of materials of a wheel (SBOM): CycloneDX, as scanners of installed packages read it.

``cyclonedx-py`` describes the package and the packages that it requires. Added here: the version, which pyproject.toml
leaves to version.py, and the code of others that is compiled into the native modules.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib


def bill(tree: Path, version: str, *, native: bool) -> str:
    """JSON, valid by the schema of CycloneDX, and the same for the same sources."""
    project = tree / "pyproject.toml"
    requirements = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    arguments = ["requirements", "-", "--pyproject", str(project), "--mc-type", "library", "--output-reproducible"]
    found = _run(["-W", "ignore", "-m", "cyclonedx_py", *arguments], "\n".join(requirements))
    text = json.dumps(complete(json.loads(found), version, highway() if native else None), indent=1, sort_keys=True)
    _run(["-c", _VALIDATE], text)
    return text


_VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
sys.exit(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()) or "") or None)
"""


def complete(described: dict[str, Any], version: str, compiled_in: str | None) -> dict[str, Any]:
    """Add polyconv's version and, for native modules, the version of Highway that is compiled in."""
    package = described["metadata"]["component"]
    package |= {"version": version, "purl": f"pkg:pypi/polyconv@{version}"}
    if compiled_in:
        described["components"].append(
            {
                "type": "library",
                "bom-ref": "highway",
                "name": "highway",
                "version": compiled_in,
                "purl": f"pkg:github/google/highway@{compiled_in}",
                "licenses": [{"expression": "Apache-2.0 OR BSD-3-Clause"}],
                "description": "headers, compiled into the CPU kernels",
            }
        )
    parts = [component["bom-ref"] for component in described["components"]]
    described["dependencies"] = [{"ref": package["bom-ref"], "dependsOn": parts}, *({"ref": part} for part in parts)]
    return described


def highway() -> str:
    """Version of the headers that the compiler finds."""
    command = [os.environ.get("CXX", "g++"), "-E", "-dM", "-include", "hwy/highway.h", "-x", "c++", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = dict(re.findall(r"#define HWY_(MAJOR|MINOR|PATCH) (\d+)", text))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def _run(arguments: list[str], text: str) -> str:
    ran = subprocess.run([sys.executable, *arguments], check=True, input=text, stdout=subprocess.PIPE, text=True)
    return ran.stdout
