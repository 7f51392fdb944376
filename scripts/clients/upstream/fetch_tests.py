"""Fetch a folder of a package's source distribution from PyPI: vLLM's comes with its tests, and
llama-cpp-python's with llama.cpp.

    python scripts/clients/upstream/fetch_tests.py vllm 0.33.0 tests /tmp/upstream

Prints the path of the folder. Nothing of the package is built or installed.
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

INDEX = "https://pypi.org/simple/"
AS_JSON = "application/vnd.pypi.simple.v1+json"


def read(url: str) -> bytes:
    """The answer to a request for `url`."""
    request = urllib.request.Request(url, headers={"Accept": AS_JSON})
    with urllib.request.urlopen(request, timeout=300) as response:
        data: bytes = response.read()
    return data


def fetch(name: str, version: str, folder: str, target: Path) -> Path:
    """The folder, unpacked below `target`; fetched only once.

    Raises:
        ValueError: the package has no source distribution, or other bytes than PyPI says.
    """
    found = target / f"{name.replace('-', '_')}-{version}" / folder
    if found.is_dir():
        return found
    page = f"{INDEX}{name}/"
    wanted = f"{name.replace('-', '_')}-{version}.tar.gz"
    files = {file["filename"]: file for file in json.loads(read(page))["files"]}
    if wanted not in files:
        raise ValueError(f"{name} {version} has no source distribution on PyPI.")
    data = read(urllib.parse.urljoin(page, files[wanted]["url"]))
    if hashlib.sha256(data).hexdigest() != files[wanted]["hashes"]["sha256"]:
        raise ValueError(f"{wanted} is not the file that PyPI names: fetch it again.")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        inside = f"{found.relative_to(target)}/"
        members = [member for member in archive if member.name.startswith(inside)]
        archive.extractall(target, members, filter="data")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("package", help="its name on PyPI")
    parser.add_argument("version", help="as 0.33.0")
    parser.add_argument("folder", help="of the distribution, as tests")
    parser.add_argument("target", type=Path, help="where to unpack it")
    options = parser.parse_args()
    try:
        print(fetch(options.package, options.version, options.folder, options.target))
    except (OSError, ValueError) as error:
        sys.exit(f"fetch_tests: {error}")


if __name__ == "__main__":
    main()
