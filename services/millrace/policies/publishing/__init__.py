"""Publishing a version: what each rank uploads, and the manifest that commits it."""
