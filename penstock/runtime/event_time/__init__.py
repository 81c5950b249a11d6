"""Event time: watermarks, and the windows that they close."""
