"""The env-server: hosts `verifiers` environments in worker processes and plays rollout groups against the engines.

The service process never imports `verifiers` (about 7 CPU-seconds); only `workers.env_worker` does.

    service.py ── pool.py ── worker_process.py ══ frames ══ env_worker.py ── v0.py / v1.py ── engine (HTTP)
        └──────── sink.py ── the run's rollout stream
"""
