"""The processes that train one model together: what they agree on, and what makes them repeat themselves."""
