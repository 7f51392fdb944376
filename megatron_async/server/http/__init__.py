"""HTTP: connections, routes, access control, and answers."""
