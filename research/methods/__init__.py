"""Published methods that are no objective: `unlearn.extensions: [research.methods.MODULE:Class]`."""
