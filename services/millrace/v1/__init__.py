"""Generated from proto/millrace/v1; never edited."""
