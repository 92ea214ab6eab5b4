"""The inference service: engines that generate with a policy, their HTTP API, and the PolicyService."""
