"""Generated from proto/millrace/internal/v1; never edited."""
