"""Figures about the queues: from the lake or the archive, and from the live messages.

    found = report_on(spark, lake="lake", database={"url": url})   # or report(archive, live) of DataFrames
    found.rows("by_queue")
    found.write_page("report.html")
    found.write_tables("report")

Every figure and the columns of every table are in docs/reference/report.md.
"""

from __future__ import annotations

from millpond.spark.report.figures import ARCHIVE_COLUMNS, LIVE_COLUMNS
from millpond.spark.report.report import Report, report
from millpond.spark.report.sources import report_on

__all__ = ["ARCHIVE_COLUMNS", "LIVE_COLUMNS", "Report", "report", "report_on"]
