"""Ride-hailing for the `penstock` command (docs/papers.md: W9): generated drivers and passengers, or files of them.

The flow is in `topology.py`, and what a run answers must be the same for every number of tasks. Files have lines of
comma-separated values without a header, in the order of their times. Lines of locations have the form of the public
tracks of taxis, (driver, order, seconds, lon, lat), or that of this application, (driver, lon, lat, time_ms). Lines of
requests have the form of the orders that belong to these tracks, (order, begin in seconds, end, lon, lat, and the place
where the ride ends), or (request, lon, lat, time_ms).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from penstock.apps.app import App, Built, above_zero_or_max, packaged
from penstock.apps.command_line import COUNT, SECONDS, Options
from penstock.apps.few import SHOWN, Few, told
from penstock.apps.rides.city import EVERY_S, REQUESTS_PER_S, Location, Locations, Requests
from penstock.apps.rides.topology import RADIUS_M, topology
from penstock.runtime.errors import FlowError
from penstock.runtime.sinks import Collect
from penstock.runtime.sources import Generator, Source, TextFiles
from penstock.runtime.status import JobStatus

_DRIVERS = 1_000
_DURATION_S = 10.0


def parse_location(line: str) -> Location:
    """Returns the location of a line, in one of the two forms."""
    fields = line.split(",")
    if len(fields) == 5:
        driver, _, at, lon, lat = fields
        return driver, float(lon), float(lat), int(at) * 1000
    if len(fields) == 4:
        driver, lon, lat, at = fields
        return driver, float(lon), float(lat), int(at)
    raise ValueError(
        "a line of locations is driver,lon,lat,time_ms or driver,order,seconds,lon,lat; this one has "
        f"{len(fields)} fields: {line[:200]!r}"
    )


def parse_request(line: str) -> Location:
    """Returns the request of a line, in one of the two forms."""
    fields = line.split(",")
    if len(fields) == 7:
        order, begin, _, lon, lat, _, _ = fields
        return order, float(lon), float(lat), int(begin) * 1000
    if len(fields) == 4:
        request, lon, lat, at = fields
        return request, float(lon), float(lat), int(at)
    raise ValueError(
        "a line of requests is request,lon,lat,time_ms or order,begin_s,end_s,lon,lat,lon,lat; this one has "
        f"{len(fields)} fields: {line[:200]!r}"
    )


def _add_options(parser: Options) -> None:
    parser.add(
        "--rate",
        metavar="R",
        type=above_zero_or_max("rate"),
        default=REQUESTS_PER_S,
        help=f"requests a second, or 'max': all of --duration as fast as possible ({REQUESTS_PER_S:g})",
    )
    parser.add("--drivers", metavar="N", type=COUNT, default=_DRIVERS, help=f"number of drivers ({_DRIVERS})")
    parser.add(
        "--every",
        metavar="S",
        type=SECONDS,
        default=EVERY_S,
        help=f"seconds between two locations of a driver ({EVERY_S:g})",
    )
    parser.add(
        "--radius",
        metavar="M",
        type=SECONDS,
        default=RADIUS_M,
        help=f"metres to the passenger that a driver is away at most ({RADIUS_M:g})",
    )
    parser.add(
        "--duration",
        metavar="S",
        type=SECONDS,
        help=f"seconds during which locations and requests come; 0: until Ctrl-C ({_DURATION_S:g})",
    )
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random city (0)")
    parser.add("--sample", is_flag=True, help="read the small files that are part of the package")
    parser.add("--locations", metavar="FILE", help="read the locations of drivers from this file")
    parser.add("--requests", metavar="FILE", help="read the requests of passengers from this file")
    parser.add(
        "--lateness",
        metavar="S",
        type=SECONDS,
        default=0.0,
        help="seconds by which lines of files may be out of order (0)",
    )


def _build(options: SimpleNamespace) -> Built:
    if (options.locations is None) != (options.requests is None):
        raise FlowError("--locations and --requests belong together; give both")
    if options.sample and options.locations is not None:
        raise FlowError("--sample reads the files of the package; leave out --locations and --requests")
    files = options.sample or options.locations is not None
    if files and options.duration is not None:
        raise FlowError("--duration is for generated requests; files are read to their ends")
    locations, requests, about = _from_files(options) if files else _generated(options)
    some = Collect()
    flow = topology(
        locations,
        requests,
        Few(some),
        radius_m=options.radius,
        lateness_s=options.lateness,
        lines=(parse_location, parse_request) if files else None,
        name=options.name,
    )

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        yield from told(status, ran, "matches", "requests answered")
        for request, driver, distance, _ in some.records()[-SHOWN:]:
            yield f"  {request}: " + ("no driver is near" if driver is None else f"{driver}, {distance:,.0f} m away")

    return Built(
        flow,
        f"the nearest driver within {options.radius:g} m for {about}",
        results,
        ("penstock run rides --sample", "penstock run rides --drivers 10000 --rate 500", "penstock explain rides"),
    )


def _from_files(options: SimpleNamespace) -> tuple[Source, Source, str]:
    if options.sample:
        paths = [str(packaged("rides_locations.csv")), str(packaged("rides_requests.csv"))]
    else:
        paths = [options.locations, options.requests]
    about = "the requests of the package" if options.sample else f"the requests of {options.requests}"
    return TextFiles(paths[0], parallel=False), TextFiles(paths[1], parallel=False), about


def _generated(options: SimpleNamespace) -> tuple[Source, Source, str]:
    if not options.every:
        raise FlowError("--every must be above 0 seconds")
    duration = _DURATION_S if options.duration is None else options.duration
    per_s = options.rate or REQUESTS_PER_S
    locations = Locations(options.seed, drivers=options.drivers, every_s=options.every)
    requests = Requests(options.seed, per_s=per_s)
    located_per_s = options.drivers / options.every
    ends = f"for {duration:g} s" if duration else "until you stop it with Ctrl-C"
    about = f"{per_s:,g} requests/s, {options.drivers:,} drivers, {located_per_s:,.0f} locations/s, {ends}"
    if options.rate is not None:
        return (
            Generator(locations, located_per_s, duration_s=duration or None),
            Generator(requests, per_s, duration_s=duration or None),
            about,
        )
    if not duration:
        raise FlowError("--rate max needs a --duration above 0: neither source may run away from the other without end")
    return (
        Generator(locations, limit=round(located_per_s * duration)),
        Generator(requests, limit=round(per_s * duration)),
        f"{about}, as fast as possible",
    )


APP = App("rides", "ride-hailing: the nearest driver for each passenger", _add_options, _build)
