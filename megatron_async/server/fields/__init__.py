"""From the JSON body of a request to what the engine is asked."""
