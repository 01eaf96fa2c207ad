"""Where everything meets: DeepSpeed's pipeline, its engine, the feed of samples and the loop."""
