"""Commands about a stack or a deployment as a whole."""
