"""Process-wide state: version of the planning state, scopes, fork safety, lazy imports, frozen weights."""
