# What `cmake --install` lays down: header, libraries, command, hmoe.pc, and the package that find_package(hmoe) reads.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hmoe)

install(FILES include/hmoe.h include/aclnn_hyper_mega_moe.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS hmoe hmoe_static hmoe_aclnn EXPORT hmoe_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET hmoe_cli)
  install(TARGETS hmoe_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# The prefix is found from where hmoe.pc lies, so an installed tree can be moved.
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(cmake/hmoe.pc.in hmoe.pc @ONLY)
configure_file(cmake/hmoe_aclnn.pc.in hmoe_aclnn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/hmoe.pc ${PROJECT_BINARY_DIR}/hmoe_aclnn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(EXPORT hmoe_targets NAMESPACE hmoe:: DESTINATION ${package_dir})
write_basic_package_version_file(hmoe-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES cmake/hmoe-config.cmake ${PROJECT_BINARY_DIR}/hmoe-config-version.cmake DESTINATION ${package_dir})

# The Python package: the library inside of it. A wheel has no links, so no versions in the file's name.
if(SKBUILD)
  set_target_properties(hmoe PROPERTIES NO_SONAME ON)
  set_property(TARGET hmoe PROPERTY VERSION)
  set_property(TARGET hmoe PROPERTY SOVERSION)
  install(TARGETS hmoe LIBRARY DESTINATION hyper_parallel COMPONENT python)
endif()
