"""HTTP: connections, routes, who may ask, and what is answered."""
