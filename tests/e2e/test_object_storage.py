"""The demo's run with an S3 server behind it: the same code path as on a cluster."""

import boto3
import pytest
from botocore.config import Config


@pytest.mark.long  # tests/integration/storage has every operation
def test_a_run_over_s3(warm, s3_endpoint) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket="e2e")
    url = f"s3://e2e/tenant?endpoint={s3_endpoint}&region=us-east-1"
    summary, output = warm.train("--max-steps", "3", env={**keys, "MILLRACE_STORE_URL": url})
    assert summary["steps"] == 3 and summary["mismatch_kl"] <= 1e-4
    assert summary["checkpoint_path"].startswith("s3://e2e/tenant/")
    assert (warm.path / summary["policy_path"] / "model.safetensors").is_file() or list(
        (warm.path / summary["policy_path"]).glob("*.safetensors")
    )
    assert "test-secret" not in output
    logs = (warm.path / summary["policy_path"]).parent / "logs"
    assert logs.is_dir() and all("test-secret" not in log.read_text() for log in logs.glob("*.log"))
    listed = client.list_objects_v2(Bucket="e2e", Prefix="tenant/millrace/runs/")["Contents"]
    assert sum(item["Key"].endswith(".pb") and "/chunk-" not in item["Key"] for item in listed) == 4, (
        "3 steps and close"
    )
