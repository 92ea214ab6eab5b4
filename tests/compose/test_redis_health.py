"""The health check of the protected stack's Redis takes the password as docker/secrets.sh and Redis do."""

import subprocess
from pathlib import Path

import pytest
import yaml

COMPOSE = Path(__file__).parents[2] / "docker-compose.tls.yml"


@pytest.mark.parametrize(
    "line", ["requirepass hunter2", 'requirepass "hunter2"', 'maxclients 100\nrequirepass  "hunter2" ']
)
def test_the_password_may_stand_in_quotes_and_beside_other_lines(line: str, tmp_path: Path) -> None:
    (tmp_path / "redis.conf").write_text(f"{line}\n")
    check = yaml.safe_load(COMPOSE.read_text())["services"]["redis"]["healthcheck"]["test"][1]
    given = check.partition(" redis-cli")[0].replace("$$", "$").replace("/run/secrets", str(tmp_path))
    told = subprocess.run(["sh", "-c", f'{given}; echo "$REDISCLI_AUTH"'], capture_output=True, text=True, check=True)
    assert told.stdout == "hunter2\n"
