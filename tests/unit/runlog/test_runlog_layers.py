"""What importing the log pulls in."""

import subprocess
import sys


def test_the_log_needs_neither_grpc_nor_torch_nor_boto3():
    code = (
        "import sys, millrace.runlog, millrace.storage, millrace.rollouts.batch_wire;"
        "bad = {'grpc', 'torch', 'boto3', 'verifiers', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
