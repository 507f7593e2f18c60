"""A Spark job between two queues."""
