"""Several servers behind one address: `octavo route` sends each request to where its prompt is cached."""
