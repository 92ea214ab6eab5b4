"""Generated code that only services of one release use."""
