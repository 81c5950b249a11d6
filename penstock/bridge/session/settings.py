"""The settings of Spark sessions: those of every session that Penstock starts, and what the caller's options add."""

from __future__ import annotations

from penstock.bridge.columns import SESSION_SETTINGS
from penstock.bridge.session.options import SparkOptions

#: What every session of ours gets, before the caller's own settings.
SETTINGS: dict[str, str] = {
    # Fixed costs of a micro-batch.
    "spark.sql.adaptive.enabled": "false",  # re-planning between stages costs more than such batches can win by it
    "spark.locality.wait": "0",  # a free core elsewhere now is better than the right one in three seconds
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",  # of results; the default of 10,000 makes more messages
    # Input becomes partitions of Arrow batches. Below the default of 48 MB the driver would turn it into rows by
    # itself: five times as slow at 100,000 rows, and out of memory at a million.
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    # Several micro-batches may be under way, of ranges that differ in size: a large one must not hold up a small one.
    "spark.scheduler.mode": "FAIR",
    "spark.python.daemon.module": "penstock.bridge.python_daemon",  # Python workers that begin at once
    **SESSION_SETTINGS,  # the same answers as from the data stream
    # A stream runs for weeks: what Spark remembers of finished jobs is bounded, and the shuffle files of a finished
    # micro-batch go when the driver's garbage collector has found it, for which it may have no other reason to run.
    "spark.cleaner.periodicGC.interval": "2min",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "500",
    "spark.sql.ui.retainedExecutions": "50",
    # Quiet, and no port that nobody asked for.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


APP_MASTER_OPTIONS = "spark.ray.raydp_app_master.extraJavaOptions"
DRIVER_OPTIONS = "spark.driver.extraJavaOptions"


def settings_for(options: SparkOptions) -> dict[str, str]:
    """Returns the settings of a session that is started with these options."""
    cores = str(options.cores * options.executors)
    own = {
        "spark.sql.shuffle.partitions": cores,  # each further one is a task to schedule, and there is no core for it
        "spark.default.parallelism": cores,
        "spark.executor.memory": options.memory,
        "spark.executor.cores": str(options.cores),
        "spark.executor.instances": str(options.executors),
        "spark.cores.max": cores,  # a standalone master would give all it has
    }
    return {**SETTINGS, **own, **{key: str(value) for key, value in options.conf.items()}}
