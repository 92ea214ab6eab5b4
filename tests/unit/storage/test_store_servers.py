"""The page of S3 servers is of those that are pinned, and one of them is what compose file and chart bundle."""

import re

import yaml

from millrace_testing.repository import REPOSITORY
from millrace_testing.stores.servers import CEPH, SERVERS, pins

PAGE = (REPOSITORY / "docs" / "object_stores.md").read_text()


def test_every_server_is_started_and_stands_on_the_page_with_its_version() -> None:
    assert {*pins(), "moto"} == set(SERVERS)
    rows = set(re.findall(r"^\| [^|]+ \| \w+ `([\w-]+)` \| ([\w.]+) \|", PAGE, re.MULTILINE))
    assert {(package, version) for _, package, version in pins().values()} <= rows
    assert {"moto", "radosgw"} <= {package for package, _ in rows} and CEPH


def test_the_bundled_server_is_one_of_them() -> None:
    bundled = pins()["seaweedfs-bundled"][2]
    values = yaml.safe_load((REPOSITORY / "charts" / "millrace" / "values.yaml").read_text())
    assert values["objectStore"]["bundled"]["image"]["tag"] == bundled
    assert f"seaweedfs:{bundled}" in (REPOSITORY / "docker-compose.yml").read_text()
